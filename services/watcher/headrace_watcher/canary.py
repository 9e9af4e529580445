"""The canary: a request of a few random tokens that must come through capture before an engine is used."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from headrace.dumps import Dump, EngineCard
from headrace.ids import CANARY, NONCE_ALPHABET, NONCE_LENGTH, RequestId
from headrace.runs import Identity
from headrace.verdicts import Reason, Refusal, Requirement, judge

TOKENS = 12
# Every vocabulary has these ids, and no model's special tokens for images or audio are among them.
LOWEST_ID, HIGHEST_ID = 1, 200

_ADVICE = {
    Reason.PREFIX_CACHED: "start the engine with --disable-radix-cache, or a version that honours extra_key",
    Reason.TOKEN_CONTENT: "the engine changes prompts; does it add a BOS token, or is something between it and us?",
    Reason.TOKEN_COUNT: "the engine cuts or extends prompts; start it without --allow-auto-truncate",
    Reason.LAYERS: "the dump and engine.json disagree; restart the engine",
    Reason.SHAPE: "the dump and engine.json disagree; restart the engine",
    Reason.ENGINE_CHANGED: "engine.json is another engine's; does one dump folder serve two engines?",
    Reason.WEIGHTS_CHANGED: "the weights were updated after engine.json was written; restart the engine",
    Reason.UNREADABLE: "do the engine and the watcher share a group, and a headrace version?",
    Reason.NO_ROOM: "free the dump folder, or give its tmpfs more room",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Canary:
    """A canary under way: what was sent, and to which life of the engine.

    `deadline`, in the caller's seconds, is when its dump must be there; `answered`: the engine said 200.
    """

    request: RequestId
    token_ids: tuple[int, ...]
    card: EngineCard
    deadline: float
    answered: bool = False

    @classmethod
    def make(cls, card: EngineCard, deadline: float, below: Callable[[int], int]) -> Canary:
        """Make one; `below(n)` draws a number from 0 to n - 1."""
        nonce = "".join(NONCE_ALPHABET[below(len(NONCE_ALPHABET))] for _ in range(NONCE_LENGTH))
        token_ids = tuple(LOWEST_ID + below(HIGHEST_ID - LOWEST_ID + 1) for _ in range(TOKENS))
        request = RequestId.make(CANARY, 0, nonce, token_ids)
        return cls(request=request, token_ids=token_ids, card=card, deadline=deadline)

    def judge(self, dump: Dump) -> Refusal | None:
        """Judge the canary's dump against the engine's own card."""
        card = self.card
        requirement = Requirement(
            boundaries=card.boundaries,
            final_state=card.final_state,
            hidden_size=card.hidden_size,
            identity=Identity(engine=card.fingerprint, weight_version=card.weight_version),
        )
        verdict = judge(dump, self.request, requirement)
        return verdict if isinstance(verdict, Refusal) else None

    def overdue(self, folder: str) -> str:
        """What to say when the deadline passed without a dump."""
        if not self.answered:
            return "the engine did not answer the canary in time; is it overloaded, or does it hang?"
        return (
            "the engine answered the canary, but no dump came: does the engine's log say that headrace captures "
            f"(plugin installed, HEADRACE_DUMP_DIR set), and is its HEADRACE_DUMP_DIR this folder, {folder}, shared?"
        )


def explain(reason: str, detail: str) -> str:
    """A refusal or loss of a canary in one line, with what to do about it."""
    known = reason in Reason.__members__.values()
    advice = _ADVICE.get(Reason(reason)) if known else None
    return f"the canary failed: {reason}: {detail}" + (f"; {advice}" if advice else "")

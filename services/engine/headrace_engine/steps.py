"""What runs in one step of the engine: requests, and which rows of which of them come next."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import Cache


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """How a request ended.

    `finish_reason` is as SGLang spells it, `dropped` says why its states are not captured, or is empty, and `cached`
    counts the prompt's tokens that were not computed.
    """

    output_ids: tuple[int, ...]
    finish_reason: dict[str, Any]
    dropped: str
    cached: int


@dataclass(slots=True, kw_only=True, eq=False)
class Request:
    """One prompt on its way through the engine; `computed` rows of it, and of its output, lie in `cache`.

    The first `cached` of them came from another prompt of the same `extra_key`.
    """

    rid: str
    prompt: tuple[int, ...]
    max_new_tokens: int
    stop_tokens: frozenset[int]
    cache: Cache
    answer: Future[Answer]
    extra_key: str = ""
    cached: int = 0
    computed: int = 0
    output: list[int] = field(default_factory=list)
    dropped: str = ""
    aborted: bool = False

    @property
    def prompt_left(self) -> int:
        """Prompt tokens that are not computed yet."""
        return max(len(self.prompt) - self.computed, 0)

    def next_tokens(self, rows: int) -> Sequence[int]:
        """The next `rows` prompt tokens, or the last output token once the prompt is computed."""
        if self.prompt_left:
            return self.prompt[self.computed : self.computed + rows]
        return self.output[-1:]

    def wants_token(self, rows: int) -> bool:
        """Whether a forward of `rows` more ends with a row whose next token is asked for."""
        return self.max_new_tokens > 0 and rows >= self.prompt_left

    def advance(self, rows: int, token: int | None) -> None:
        """Count a forward's rows, and take the token it gave."""
        self.computed += rows
        if token is not None:
            self.output.append(token)

    def finish_reason(self) -> dict[str, Any] | None:
        """Why the request is over, or None while it is not."""
        if self.prompt_left:
            return None
        if self.output and self.output[-1] in self.stop_tokens:
            return {"type": "stop", "matched": self.output[-1]}
        if len(self.output) >= self.max_new_tokens:
            return {"type": "length", "length": self.max_new_tokens}
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """The next `rows` rows of one request."""

    request: Request
    rows: int


def plan(waiting: Iterable[Request], decoding: Sequence[Request], *, budget: int, max_running: int) -> list[Chunk]:
    """Choose a step: prompts first come first served, up to `budget` prompt tokens, then a row of each that decodes.

    The last prompt may be cut when the budget ends inside it. It stays the first in `waiting`, so it continues first
    and at most one request is half computed. A step holds at most `max_running` requests. No more is taken from
    `waiting` than is chosen.
    """
    chunks: list[Chunk] = []
    for request in islice(waiting, max(0, max_running - len(decoding))):
        rows = min(budget, request.prompt_left)
        chunks.append(Chunk(request=request, rows=rows))
        budget -= rows
        if not budget:
            break
    return chunks + [Chunk(request=request, rows=1) for request in decoding]

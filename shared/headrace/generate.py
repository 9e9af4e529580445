"""SGLang's `/generate` as headrace uses it: the body of a prefill-only request, and what an answer means."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import orjson

from headrace.reasons import LOST_REASONS, Reason

HEADERS = {"Content-Type": "application/json"}
# The field of `meta_info` in which the capture core says what it could not publish.
META_FIELD, DROPPED = "headrace", "dropped:"

_STATUS = "http_"
_ABORTED, _BAD_REQUEST = "aborted", f"{_STATUS}400"  # what SGLang says of a request that it looked at

Outcome = Literal["answered", "refused", "unavailable", "timeout", "dropped"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What one POST came to, and whether it costs the sample an attempt.

    `answered`: the dump must come. `refused`: a 4xx, an abort, or a 200 that is no answer of `/generate`.
    `unavailable`: no connection, or a 5xx. `dropped`: the capture core says that it cannot publish, for `reason`.
    """

    outcome: Outcome
    reason: str = ""
    detail: str = ""

    @property
    def burns(self) -> bool:
        """Whether the attempt counts: not for an engine that is away by itself, nor for one without room."""
        return self.outcome != "unavailable" and self.reason != Reason.NO_ROOM

    @property
    def counted(self) -> bool:
        """Whether, costing nothing, it may still be the prompt's doing: a 5xx, and not an engine that is not there."""
        return self.outcome == "unavailable" and self.reason.startswith(_STATUS)

    @property
    def computing(self) -> bool:
        """Whether it shows the engine at work. What a proxy before it may have said itself does not."""
        return self.outcome in ("answered", "dropped") or self.reason in (_ABORTED, _BAD_REQUEST)


def encode_body(request: str, token_ids: Sequence[int]) -> bytes:
    """The body that prefills one prompt. Its `extra_key` is its id: no prefix cache is hit, whatever the flags."""
    return orjson.dumps(
        {
            "input_ids": token_ids,
            "rid": request,
            "extra_key": request,
            "sampling_params": {"max_new_tokens": 0, "temperature": 0},
            "stream": False,
        }
    )


def read_answer(status: int, content: bytes) -> Answer:
    """Read an HTTP answer of `/generate`; the reason is always one of a few, what was said is the detail."""
    if status >= 500:
        return Answer(outcome="unavailable", reason=f"{_STATUS}{status}", detail=_text(content))
    if status != 200:
        return Answer(outcome="refused", reason=f"{_STATUS}{status}", detail=_text(content))
    try:
        meta: Any = orjson.loads(content)["meta_info"]
        dropped = meta.get(META_FIELD, "")
        finish = meta.get("finish_reason")
    except (orjson.JSONDecodeError, KeyError, TypeError, AttributeError, IndexError) as error:
        return Answer(outcome="refused", reason="bad_answer", detail=f"{error!r}: {_text(content)}")
    if isinstance(dropped, list):  # SGLang's customized_info: one entry a row
        dropped = next((entry for entry in dropped if entry), "")
    if isinstance(dropped, str) and dropped.startswith(DROPPED):
        word = dropped.removeprefix(DROPPED)
        reason = word if word in LOST_REASONS else Reason.INTERNAL
        return Answer(outcome="dropped", reason=reason, detail=dropped[:300])
    if isinstance(finish, dict) and finish.get("type") == "abort":
        return Answer(outcome="refused", reason=_ABORTED, detail=str(finish.get("message", ""))[:300])
    return Answer(outcome="answered")


def _text(content: bytes) -> str:
    return content[:300].decode(errors="replace")

"""Posts prefill-only requests to an engine and says what its answer means."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import orjson
import requests

CONNECT_SECONDS = 5.0

Outcome = Literal["answered", "refused", "unavailable", "timeout", "dropped"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What one POST came to, and whether it costs the sample an attempt.

    `answered`: the dump must come. `refused`: a 4xx, or an abort. `unavailable`: no connection, or a 5xx.
    `dropped`: the plugin says that it cannot publish, for `reason`.
    """

    outcome: Outcome
    reason: str = ""
    detail: str = ""

    @property
    def burns(self) -> bool:
        """Whether the attempt counts: not for an engine that is away, nor for one without room."""
        return self.outcome != "unavailable" and self.reason != "no_room"


class EngineClient:
    """`/generate` over keep-alive sessions, one a thread."""

    def __init__(self, timeout: float) -> None:
        """Wait at most `timeout` seconds for an answer."""
        self._timeout = timeout
        self._local = threading.local()

    def generate(self, url: str, request: str, token_ids: Sequence[int]) -> Answer:
        """Prefill one prompt. Its `extra_key` is its id, so no prefix cache is hit whatever the server's flags."""
        body = {
            "input_ids": token_ids,
            "rid": request,
            "extra_key": request,
            "sampling_params": {"max_new_tokens": 0, "temperature": 0},
            "stream": False,
        }
        try:
            response = self._session().post(
                f"{url}/generate",
                data=orjson.dumps(body),
                headers={"Content-Type": "application/json"},
                timeout=(CONNECT_SECONDS, self._timeout),
            )
        except requests.exceptions.ReadTimeout as error:
            self.abort(url, request)
            return Answer(outcome="timeout", reason="timeout", detail=str(error))
        except requests.RequestException as error:
            return Answer(outcome="unavailable", reason="connection", detail=f"{type(error).__name__}: {error}")
        return read_answer(response.status_code, response.content)

    def abort(self, url: str, request: str) -> None:
        """Ask the engine to drop a request that nobody waits for; what comes of it does not matter."""
        try:
            self._session().post(f"{url}/abort_request", json={"rid": request}, timeout=CONNECT_SECONDS)
        except requests.RequestException:
            pass

    def _session(self) -> requests.Session:
        session: requests.Session | None = getattr(self._local, "session", None)
        if session is None:
            session = self._local.session = requests.Session()
            session.trust_env = False  # engines are addressed directly: no proxy in between
        return session


def read_answer(status: int, content: bytes) -> Answer:
    """Read an HTTP answer of `/generate`."""
    if status >= 500:
        return Answer(outcome="unavailable", reason=f"http_{status}", detail=_text(content))
    if status != 200:
        return Answer(outcome="refused", reason=f"http_{status}", detail=_text(content))
    try:
        body: Any = orjson.loads(content)
        meta = body["meta_info"]
        dropped = meta.get("headrace", "")
        if isinstance(dropped, list):  # SGLang's customized_info: one entry a row
            dropped = next((entry for entry in dropped if entry), "")
        finish = meta.get("finish_reason")
    except (orjson.JSONDecodeError, KeyError, TypeError, AttributeError) as error:
        return Answer(outcome="unavailable", reason="bad_answer", detail=f"{error!r}: {_text(content)}")
    if isinstance(dropped, str) and dropped.startswith("dropped:"):
        return Answer(outcome="dropped", reason=dropped.removeprefix("dropped:"), detail=dropped)
    if isinstance(finish, dict) and finish.get("type") == "abort":
        return Answer(outcome="refused", reason="aborted", detail=str(finish.get("message", "")))
    return Answer(outcome="answered")


def _text(content: bytes) -> str:
    return content[:300].decode(errors="replace")

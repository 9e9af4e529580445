"""Posts prefill-only requests to engines, over connections that are kept."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import requests

from headrace.generate import HEADERS, Answer, encode_body, read_answer
from headrace_dispatcher.breaker import ANSWER_SECONDS

CONNECT_SECONDS = 5.0


class EngineClient:
    """`/generate`, `/abort_request` and `/health_generate`, for any number of threads."""

    def __init__(self, timeout: float) -> None:
        """Wait at most `timeout` seconds for an answer."""
        self._timeout = timeout
        self._free: deque[requests.Session] = deque()

    def generate(self, url: str, request: str, token_ids: Sequence[int]) -> Answer:
        """Prefill one prompt."""
        try:
            with self._session() as session:
                response = session.post(
                    f"{url}/generate",
                    data=encode_body(request, token_ids),
                    headers=HEADERS,
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
            with self._session() as session:
                session.post(f"{url}/abort_request", json={"rid": request}, timeout=CONNECT_SECONDS)
        except requests.RequestException:
            pass

    def probe(self, url: str) -> str:
        """Have the engine compute something that is no sample. Returns what is wrong, or nothing if it did."""
        limit = min(ANSWER_SECONDS, self._timeout)
        try:
            with self._session() as session:
                response = session.get(f"{url}/health_generate", timeout=(CONNECT_SECONDS, limit))
        except requests.exceptions.ReadTimeout:
            return f"a probe without an answer in {limit:g} s"
        except requests.RequestException as error:
            return f"a probe that failed ({type(error).__name__})"
        return "" if response.status_code == 200 else f"a probe that brought http_{response.status_code}"

    @contextmanager
    def _session(self) -> Iterator[requests.Session]:
        """A session that no other thread uses meanwhile; there are as many as requests were in flight at once."""
        try:
            session = self._free.pop()
        except IndexError:
            session = requests.Session()
            session.trust_env = False  # engines are addressed directly: no proxy in between
        try:
            yield session
        finally:
            self._free.append(session)

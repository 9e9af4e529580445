"""Talks HTTP to the engine in one helper thread, so that a slow engine never delays a verdict."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Self

import requests

from headrace import logs
from headrace.generate import HEADERS, encode_body, read_answer
from headrace.ids import RequestId
from headrace_watcher.canary import explain

log = logs.get(__name__)

HEALTH_TIMEOUT = 10.0
INFO_TIMEOUT = 10.0
# SGLang takes prompts up to its context length less this many tokens.
RESERVED_TOKENS = 6
# SGLang before and after it renamed its paths.
_INFO_PATHS = ("/get_server_info", "/server_info", "/get_model_info", "/model_info")


@dataclass(frozen=True, slots=True, kw_only=True)
class Health:
    """The result of a health check; an empty problem is a 200."""

    problem: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """The longest prompt that the engine takes, in tokens; None when it does not tell."""

    longest_prompt: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Posted:
    """The canary was answered, or the problem says why not."""

    request: RequestId
    problem: str


Answer = Health | Limits | Posted


class EngineClient:
    """One engine, asked by one thread; answers are fetched with `answers`, and `wake` is set when there is one."""

    def __init__(self, url: str, wake: threading.Event) -> None:
        """Ask the engine at this URL."""
        self._url = url.rstrip("/")
        self._wake = wake
        self._work: queue.SimpleQueue[Callable[[], Answer] | None] = queue.SimpleQueue()
        self._answers: queue.SimpleQueue[Answer] = queue.SimpleQueue()
        self._checking = threading.Event()
        self._session = requests.Session()
        # The engine is asked directly: a proxy of the environment would answer in its place.
        self._session.trust_env = False
        # A daemon: a request under way must not hold the process when it is told to stop.
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def __enter__(self) -> Self:
        """Start the thread."""
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Let the thread end after what it is doing."""
        self._work.put(None)

    def check_health(self) -> None:
        """Ask for the engine's health, unless that is under way."""
        if not self._checking.is_set():
            self._checking.set()
            self._work.put(self._health)

    def post_canary(self, request: RequestId, token_ids: tuple[int, ...], timeout: float) -> None:
        """Ask for the longest prompt, then send the canary."""
        self._work.put(self._limits)
        self._work.put(lambda: self._post(request, token_ids, timeout))

    def answers(self) -> list[Answer]:
        """What came since the last call, in order."""
        found = []
        while not self._answers.empty():
            found.append(self._answers.get())
        return found

    def _run(self) -> None:
        while (work := self._work.get()) is not None:
            try:
                self._answers.put(work())
            except Exception:  # without this thread, no engine would be seen again, and nothing would say so
                log.exception("asking the engine")
            self._wake.set()
        self._session.close()

    def _health(self) -> Health:
        try:
            response = self._session.get(f"{self._url}/health", timeout=HEALTH_TIMEOUT)
        except requests.RequestException as error:
            return Health(problem=f"no answer from {self._url}/health: {_short(error)}")
        finally:
            self._checking.clear()
        return Health(problem="" if response.status_code == 200 else f"{self._url}/health says {response.status_code}")

    def _limits(self) -> Limits:
        for path in _INFO_PATHS:
            try:
                table = self._session.get(f"{self._url}{path}", timeout=INFO_TIMEOUT).json()
            except requests.RequestException:
                continue
            longest = longest_prompt(table)
            if longest is not None:
                return Limits(longest_prompt=longest)
        return Limits(longest_prompt=None)

    def _post(self, request: RequestId, token_ids: tuple[int, ...], timeout: float) -> Posted:
        url, body = f"{self._url}/generate", encode_body(str(request), token_ids)
        try:
            response = self._session.post(url, data=body, headers=HEADERS, timeout=timeout)
        except requests.RequestException as error:
            return Posted(request=request, problem=f"POST {url}: {_short(error)}")
        answer = read_answer(response.status_code, response.content)
        problem = ""
        if answer.outcome == "dropped":
            problem = explain(answer.reason, answer.detail)
        elif answer.outcome != "answered":
            problem = f"{url} answered the canary with {answer.reason}: {answer.detail}"
        return Posted(request=request, problem=problem)


def longest_prompt(table: Any) -> int | None:
    """The longest prompt in tokens by an engine's own account: `max_req_input_len`, or its context length's."""
    if not isinstance(table, dict):
        return None
    for key, reserved in (("max_req_input_len", 0), ("context_length", RESERVED_TOKENS)):
        value = table.get(key)
        if type(value) is int and value > reserved:
            return value - reserved
    return None


def _short(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"[:200]

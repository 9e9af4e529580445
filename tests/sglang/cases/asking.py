"""What a test asks of an SGLang server: prompts of ours and of others, and the server's own controls."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import requests

from headrace.ids import NONCE_ALPHABET, NONCE_LENGTH, RequestId

SECONDS = 120.0  # no request of a test takes nearly as long
T = TypeVar("T")
_SPECIAL = 3  # the tiny models' special ids come first


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """Token ids and the request id under which they are sent."""

    rid: str
    ids: tuple[int, ...]


class Prompts:
    """Random prompts with fresh ids; the same seed gives the same prompts."""

    def __init__(self, vocab: int, seed: str, run: str = "cases") -> None:
        self._vocab = vocab
        self._rng = random.Random(seed)
        self._run = run
        self._ordinals = itertools.count()

    def ids(self, count: int) -> tuple[int, ...]:
        """Random token ids, no special ones among them."""
        return tuple(self._rng.randrange(_SPECIAL, self._vocab) for _ in range(count))

    def new(self, count: int) -> Prompt:
        """A prompt of so many tokens."""
        return self.of(self.ids(count))

    def of(self, ids: Sequence[int]) -> Prompt:
        """A new attempt at the same tokens."""
        nonce = "".join(self._rng.choice(NONCE_ALPHABET) for _ in range(NONCE_LENGTH))
        return Prompt(rid=str(RequestId.make(self._run, next(self._ordinals), nonce, ids)), ids=tuple(ids))

    def some(self, count: int, low: int, high: int) -> list[Prompt]:
        """So many prompts of `low` to `high` tokens."""
        return [self.new(self._rng.randint(low, high)) for _ in range(count)]


class Client:
    """HTTP to one server; `begin_*` sends in a thread and gives a future."""

    def __init__(self, url: str, threads: int = 64) -> None:
        self.url = url
        self._threads = ThreadPoolExecutor(threads, "client")

    def close(self) -> None:
        """Wait for what is under way."""
        self._threads.shutdown()

    def post(self, path: str, body: Any = None, timeout: float = SECONDS) -> requests.Response:
        """A POST of JSON."""
        return requests.post(self.url + path, json=body, timeout=timeout)

    def get(self, path: str) -> requests.Response:
        """A GET."""
        return requests.get(self.url + path, timeout=SECONDS)

    def generate(
        self,
        ids: Sequence[int] | Sequence[Sequence[int]],
        rid: str | list[str] | None,
        new_tokens: int = 0,
        timeout: float = SECONDS,
        **more: Any,
    ) -> requests.Response:
        """POST to /generate, greedily and past any end-of-sequence token."""
        sampling = {"max_new_tokens": new_tokens, "temperature": 0, "ignore_eos": True}
        return self.post("/generate", {"input_ids": ids, "rid": rid, "sampling_params": sampling} | more, timeout)

    def capture(self, prompt: Prompt, new_tokens: int = 0, timeout: float = SECONDS, **more: Any) -> requests.Response:
        """POST a prompt as the dispatcher does: its `extra_key` is its id."""
        return self.generate(prompt.ids, prompt.rid, new_tokens, timeout, **{"extra_key": prompt.rid, **more})

    def begin_capture(self, prompt: Prompt, new_tokens: int = 0, **more: Any) -> Future[requests.Response]:
        """`capture` in a thread."""
        return self._threads.submit(self.capture, prompt, new_tokens, **more)

    def begin_generate(self, ids: Any, rid: Any = None, new_tokens: int = 0, **more: Any) -> Future[requests.Response]:
        """`generate` in a thread."""
        return self._threads.submit(self.generate, ids, rid, new_tokens, **more)

    def begin(self, function: Callable[..., T], *args: Any) -> Future[T]:
        """Any call in a thread."""
        return self._threads.submit(function, *args)

    def pause(self, mode: str) -> None:
        """Stop the scheduler: `retract` or `in_place`."""
        self._control("/pause_generation", {"mode": mode})

    def resume(self) -> None:
        """Let it go on."""
        self._control("/continue_generation", {})

    def abort(self, rid: str = "", *, everything: bool = False) -> None:
        """Abort a request, or all."""
        self._control("/abort_request", {"rid": rid, "abort_all": everything})

    @contextmanager
    def slowed(self, seconds: float = 0.15) -> Iterator[None]:
        """The scheduler sleeps before each forward, so that something can be done between two of them."""
        self.slow_down(seconds)
        try:
            yield
        finally:
            self.slow_down(None)

    def slow_down(self, seconds: float | None) -> None:
        """The same, for good; None undoes it."""
        self._control("/slow_down", {"forward_sleep_time": seconds})

    def _control(self, path: str, body: dict[str, Any]) -> None:
        answer = self.post(path, body)
        assert answer.status_code == 200, (path, answer.text)


def meta(answer: requests.Response) -> dict[str, Any]:
    """`meta_info` of an answer that is a 200."""
    assert answer.status_code == 200, answer.text
    table: dict[str, Any] = answer.json()["meta_info"]
    return table

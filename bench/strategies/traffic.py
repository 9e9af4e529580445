"""What a shared server gets beside a client's requests: health probes, and somebody else's chats."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

import requests

from bench.strategies.samples import Prompts

_PROBE_SECONDS, _CHAT_SECONDS = 1.0, 0.5
_NEW_TOKENS = 8


class Traffic:
    """Sends both at intervals until the block ends; `probes` and `chats` count what was answered.

    Raises:
        requests.RequestException: at the end of the block, if one was not answered well; none of its kind came after.
    """

    def __init__(self, url: str, seed: int) -> None:
        self.probes = self.chats = 0
        self._url = url
        self._prompts = Prompts(seed)
        self._over = threading.Event()
        self._pool = ThreadPoolExecutor(2)
        self._sending: list[Future[None]] = []

    def __enter__(self) -> Traffic:
        for send, seconds in ((self._probe, _PROBE_SECONDS), (self._chat, _CHAT_SECONDS)):
            self._sending.append(self._pool.submit(self._repeat, send, seconds))
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._over.set()
        self._pool.shutdown()
        if kind is None:
            for sending in self._sending:
                sending.result()

    def _repeat(self, send: Callable[[], None], seconds: float) -> None:
        while not self._over.wait(seconds):
            send()

    def _probe(self) -> None:
        requests.get(f"{self._url}/health_generate", timeout=60).raise_for_status()
        self.probes += 1

    def _chat(self) -> None:
        body = {"input_ids": self._prompts.next(), "sampling_params": {"max_new_tokens": _NEW_TOKENS}}
        requests.post(f"{self._url}/generate", json=body, timeout=60).raise_for_status()
        self.chats += 1

"""What a shared server gets beside a client's requests: health probes, and somebody else's chats."""

from __future__ import annotations

import threading
from collections.abc import Callable

import requests

from bench.strategies.samples import Prompts

_PROBE_SECONDS, _CHAT_SECONDS = 1.0, 0.5
_NEW_TOKENS = 8


class Traffic:
    """Sends both at intervals until the block ends; `probes` and `chats` count what was answered."""

    def __init__(self, url: str, seed: int) -> None:
        self.probes = self.chats = 0
        self._url = url
        self._prompts = Prompts(seed)
        self._over = threading.Event()
        pairs = ((self._probe, _PROBE_SECONDS), (self._chat, _CHAT_SECONDS))
        self._threads = [threading.Thread(target=self._repeat, args=pair) for pair in pairs]

    def __enter__(self) -> Traffic:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join()

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

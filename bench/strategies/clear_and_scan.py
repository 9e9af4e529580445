"""Pairs by looking: empty the dump folder, send a request, take what appears."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from bench.strategies.client import Server


class ClearAndScan:
    """Each worker does so on its own."""

    def __init__(self, server: Server) -> None:
        self._server = server

    def extract(self, prompt: Sequence[int], row: Path) -> None:
        """Take the first dump of those that are there with the answer."""
        self._server.clear()
        self._server.prefill(prompt)
        self._server.take(row, lambda _: True)

"""Pairs by length: a dump with as many rows as the prompt has tokens is the prompt's."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from bench.strategies.client import Server


class ByTokenCount:
    """Takes any order, and passes over what does not fit."""

    def __init__(self, server: Server) -> None:
        self._server = server

    def extract(self, prompt: Sequence[int], row: Path) -> None:
        """Take the first dump that fits."""
        self._server.prefill(prompt)
        self._server.take(row, lambda dump: dump.rows == len(prompt))

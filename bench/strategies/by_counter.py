"""Pairs by counting: the server numbers its dumps, so the k-th request's dump has the number k after the last seen."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path

from bench.strategies.client import Server


class ByCounter:
    """Looks at the dump folder once, at the start."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._numbers = itertools.count(max((dump.number for dump in server.finished()), default=-1) + 1)

    def extract(self, prompt: Sequence[int], row: Path) -> None:
        """Take the dump of the number that this request must get."""
        number = next(self._numbers)
        self._server.prefill(prompt)
        self._server.take(row, lambda dump: dump.number == number)

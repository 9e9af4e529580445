"""What a manifest says of the samples that failed: the newest line of each, and what became of it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from headrace.manifest import Line


class Failures:
    """The failed samples among the lines that went by. Memory is a byte a sample, and a line for each that failed.

    The newest line of a sample is the one of the latest `at`; writers see to it that a later line's is later.
    """

    def __init__(self, total: int) -> None:
        """Of a run of `total` samples; no line was seen yet."""
        self._newest: dict[int, Line] = {}
        self._closed = bytearray(total)  # by a stored or a rejected line

    def noting(self, lines: Iterable[Line]) -> Iterator[Line]:
        """Pass the lines on, and take note of them."""
        for line in lines:
            if 0 <= line.ordinal < len(self._closed):
                self._note(line)
            yield line

    def standing(self) -> list[Line]:
        """The newest lines of the samples that are neither stored nor rejected."""
        return [line for line in self._newest.values() if not self._closed[line.ordinal]]

    def _note(self, line: Line) -> None:
        if line.status != "failed":
            self._closed[line.ordinal] = 1
        else:
            known = self._newest.get(line.ordinal)
            if known is None or line.at >= known.at:
                self._newest[line.ordinal] = line

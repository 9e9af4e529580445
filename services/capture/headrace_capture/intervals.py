"""Which rows of a prompt have been seen: a set of integers kept as disjoint intervals."""

from __future__ import annotations

from bisect import bisect_left, bisect_right


class Coverage:
    """The covered rows as sorted, disjoint, non-touching intervals [begin, end)."""

    __slots__ = ("_begins", "_ends")

    def __init__(self) -> None:
        self._begins: list[int] = []
        self._ends: list[int] = []

    def add(self, begin: int, end: int) -> int:
        """Cover [begin, end) and return how many of these rows were covered already."""
        if not 0 <= begin < end:
            raise ValueError(f"[{begin}, {end}) is no range of rows")
        # Intervals that overlap or touch [begin, end) lie at [low, high).
        low = bisect_left(self._ends, begin)
        high = bisect_right(self._begins, end)
        repeated = sum(max(0, min(end, self._ends[i]) - max(begin, self._begins[i])) for i in range(low, high))
        if low < high:
            begin = min(begin, self._begins[low])
            end = max(end, self._ends[high - 1])
        self._begins[low:high] = [begin]
        self._ends[low:high] = [end]
        return repeated

    def covers(self, rows: int) -> bool:
        """Whether [0, rows) is covered."""
        return bool(self._begins) and self._begins[0] == 0 and self._ends[0] >= rows

    def missing(self, rows: int) -> int:
        """How many of [0, rows) are not covered."""
        return rows - sum(min(e, rows) - min(b, rows) for b, e in zip(self._begins, self._ends, strict=True))

    def intervals(self) -> list[tuple[int, int]]:
        """The intervals, ascending."""
        return list(zip(self._begins, self._ends, strict=True))

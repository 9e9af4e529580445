"""A dump's statistics: per boundary the non-finite values and the extremes of the row norms, merged over parts."""

from __future__ import annotations

import math

import torch

from headrace.dumps import Stats
from headrace_capture.rows import Rows, RowShape

_BLOCK = 256  # rows that are widened to float64 at once


class Accumulator:
    """Merges the statistics of a request's parts; a row that was computed twice counts twice."""

    __slots__ = ("_columns", "_high", "_low", "_not_finite")

    def __init__(self, shape: RowShape) -> None:
        self._columns = shape.boundaries + 1
        self._not_finite = [0] * self._columns
        self._low = [math.inf] * self._columns
        self._high = [-math.inf] * self._columns

    def add(self, rows: Rows, begin: int, end: int) -> None:
        """Add rows [begin, end) of those that lie in a slot."""
        norms = rows.norms(begin, end)
        low_and_high = torch.aminmax(norms, dim=0)
        lows: list[float] = low_and_high.min.tolist()
        highs: list[float] = low_and_high.max.tolist()
        for column, (low, high) in enumerate(zip(lows, highs, strict=True)):
            if low > 0 and high < math.inf:  # NaN fails both
                self._merge(column, low, high)
            else:
                self._add_exactly(column, norms[:, column], rows.states(column, begin, end))

    def stats(self, boundaries: tuple[int, ...]) -> tuple[Stats, ...]:
        """The statistics so far; the norms are those of finite rows, 0 where there is none."""
        layers = [*(str(boundary) for boundary in boundaries), "final"]
        return tuple(
            Stats(
                layer=layer,
                not_finite=self._not_finite[column],
                norm_min=self._low[column] if self._low[column] < math.inf else 0.0,
                norm_max=max(self._high[column], 0.0),
            )
            for column, layer in enumerate(layers)
        )

    def _add_exactly(self, column: int, norms: torch.Tensor, states: torch.Tensor) -> None:
        # A float32 norm of 0 or infinity may be an underflow or overflow of the squares; NaN says that a value is NaN.
        odd = ~torch.isfinite(norms) | (norms == 0)
        if not bool(odd.all()):
            plain = norms[~odd]
            self._merge(column, float(plain.min()), float(plain.max()))
        rows = torch.nonzero(odd).flatten()
        for first in range(0, len(rows), _BLOCK):
            values = states[rows[first : first + _BLOCK]].to(torch.float64)
            finite = torch.isfinite(values)
            self._not_finite[column] += int(values.numel() - finite.sum())
            exact = torch.linalg.vector_norm(values[finite.all(dim=1)], dim=1)
            if len(exact):
                self._merge(column, float(exact.min()), float(exact.max()))

    def _merge(self, column: int, low: float, high: float) -> None:
        self._low[column] = min(self._low[column], low)
        self._high[column] = max(self._high[column], high)

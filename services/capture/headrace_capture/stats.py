"""A dump's statistics: per boundary the non-finite values and the extremes of the row norms, merged over parts."""

from __future__ import annotations

import math

import torch

from headrace.dumps import Stats
from headrace_capture.rows import RowShape, Views

_BLOCK = 256  # rows that are widened to float64 at once


class Accumulator:
    """Merges the statistics of a request's parts; a row that was computed twice counts twice."""

    def __init__(self, shape: RowShape) -> None:
        self._shape = shape
        self._not_finite = [0] * (shape.boundaries + 1)
        self._low = [math.inf] * (shape.boundaries + 1)
        self._high = [-math.inf] * (shape.boundaries + 1)

    def add(self, views: Views, begin: int, end: int) -> None:
        """Add rows [begin, end) of a slot."""
        norms = views.norms[begin:end]
        lows: list[float] = norms.amin(0).tolist()
        highs: list[float] = norms.amax(0).tolist()
        for column, (low, high) in enumerate(zip(lows, highs, strict=True)):
            if low > 0 and high < math.inf:  # NaN fails both
                self._merge(column, low, high)
            else:
                self._add_exactly(column, norms[:, column], self._states(views, column)[begin:end])

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

    def _states(self, views: Views, column: int) -> torch.Tensor:
        if column == self._shape.boundaries:
            return views.final
        return views.aux[:, column * self._shape.hidden_size : (column + 1) * self._shape.hidden_size]

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

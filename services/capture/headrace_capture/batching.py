"""How the rows of a forward are cut into batches, each of which fills one slot of the buffer."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from headrace_capture.assembly import Place


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """`rows` rows of a place, from its row `offset` on."""

    place: Place
    offset: int
    rows: int

    @property
    def source(self) -> int:
        """The first row, in the forward."""
        return self.place.source + self.offset

    @property
    def at(self) -> int:
        """The first row, in the prompt."""
        return self.place.begin + self.offset

    @property
    def completes(self) -> bool:
        """Whether the request is whole once this cut and those before it are written."""
        return self.place.complete and self.at + self.rows == self.place.end


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Adjacent rows [begin, end) of a forward, and whose they are."""

    begin: int
    end: int
    cuts: tuple[Cut, ...]

    @property
    def rows(self) -> int:
        """How many rows."""
        return self.end - self.begin


def batches(places: Iterable[Place], max_rows: int) -> list[Batch]:
    """Join places, given in row order, that lie side by side, into batches of at most `max_rows` rows.

    Rows between places are not taken along. Only a place that is larger than a whole batch is cut: a request that is
    written in one piece need not be read again for its checksum.
    """
    made: list[Batch] = []
    pending: list[Cut] = []
    for place in places:
        rows = place.end - place.begin
        offset = 0
        while offset < rows:
            source = place.source + offset
            if pending and (_end(pending) != source or source - pending[0].source + min(rows, max_rows) > max_rows):
                made.append(_batch(pending))
                pending = []
            pending.append(Cut(place=place, offset=offset, rows=min(max_rows, rows - offset)))
            offset += pending[-1].rows
    if pending:
        made.append(_batch(pending))
    return made


def _end(cuts: Sequence[Cut]) -> int:
    return cuts[-1].source + cuts[-1].rows


def _batch(cuts: Sequence[Cut]) -> Batch:
    return Batch(begin=cuts[0].source, end=_end(cuts), cuts=tuple(cuts))

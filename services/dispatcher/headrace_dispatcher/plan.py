"""Which pending samples go to a site now: a pure decision."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence, Set
from dataclasses import dataclass
from enum import StrEnum

from headrace.flow import Caps, Room, can_ever_fit


class Fit(StrEnum):
    """How a sample stands to the sites that could serve its run."""

    NOW = "now"
    ELSEWHERE = "elsewhere"
    NOWHERE = "nowhere"


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """One site: its caps, the longest prompt its engine takes, and the bytes of dump per token."""

    caps: Caps
    context_length: int
    bytes_per_token: int

    def could_take(self, tokens: int) -> bool:
        """Whether a prompt of this length would fit if nothing else ran there."""
        return tokens <= self.context_length and can_ever_fit(self.caps, tokens, dump_bytes(tokens, self))


def dump_bytes(tokens: int, limits: Limits) -> int:
    """Bytes that a dump of so many tokens takes: states, ids, the header, and the folder's last page."""
    return tokens * limits.bytes_per_token + 16384


def choose(lengths: Iterable[int], room: Room, here: Limits, elsewhere: Sequence[Limits]) -> Iterator[Fit]:
    """Decide for the next pending samples, given by their lengths in tokens, until one must wait for room.

    Samples keep their order: behind one that must wait all wait, so that a long prompt is not starved by short
    ones. A sample that only another site can take, or none, is passed over.
    """
    for tokens in lengths:
        if not here.could_take(tokens):
            yield Fit.ELSEWHERE if any(site.could_take(tokens) for site in elsewhere) else Fit.NOWHERE
        elif room.fits(tokens, dump_bytes(tokens, here)):
            room = room.less(tokens, dump_bytes(tokens, here))
            yield Fit.NOW
        else:
            return


class Nowhere:
    """Since when samples fit no site without a break. Times are the caller's seconds."""

    def __init__(self, patience: float) -> None:
        """A sample is due that fitted no site for so long."""
        self._patience = patience
        self._since: dict[str, dict[int, float]] = {}

    def due(self, run: str, seen: Set[int], now: float) -> list[int]:
        """Take in the ordinals of a run that fit no site now, which are all that count from here on; name those due."""
        before = self._since.get(run, {})
        self._since[run] = {ordinal: before.get(ordinal, now) for ordinal in seen}
        return [ordinal for ordinal, since in self._since[run].items() if now - since >= self._patience]

    def forget(self, run: str) -> None:
        """Nothing is known about a run any more."""
        self._since.pop(run, None)

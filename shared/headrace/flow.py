"""Flow control as pure decisions: what one more request may cost, and whether it can ever fit."""

from __future__ import annotations

from dataclasses import dataclass

_ROUNDING = 1e-6  # 29 of 100 is not more than 0.29, though 0.29 * 100 < 29


@dataclass(frozen=True, slots=True, kw_only=True)
class Caps:
    """What a site takes at once: requests in flight, their tokens, and bytes in its dump folder."""

    requests: int
    tokens: int
    dump_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """What a site carries: requests in flight, their tokens, the bytes promised to them, the bytes measured."""

    requests: int
    tokens: int
    promised_bytes: int
    measured_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Room:
    """What a site takes now; never negative."""

    requests: int
    tokens: int
    dump_bytes: int

    def fits(self, tokens: int, dump_bytes: int) -> bool:
        """Whether one more request of this size may be claimed now."""
        return self.requests >= 1 and self.tokens >= tokens and self.dump_bytes >= dump_bytes

    def less(self, tokens: int, dump_bytes: int) -> Room:
        """The room that is left after one more request."""
        return Room(
            requests=max(0, self.requests - 1),
            tokens=max(0, self.tokens - tokens),
            dump_bytes=max(0, self.dump_bytes - dump_bytes),
        )


def room(caps: Caps, load: Load) -> Room:
    """The cap less what the folder measures less what is promised."""
    return Room(
        requests=max(0, caps.requests - load.requests),
        tokens=max(0, caps.tokens - load.tokens),
        dump_bytes=max(0, caps.dump_bytes - load.measured_bytes - load.promised_bytes),
    )


def can_ever_fit(caps: Caps, tokens: int, dump_bytes: int) -> bool:
    """Whether a request of this size would fit the site if nothing else ran there."""
    return caps.requests >= 1 and tokens <= caps.tokens and dump_bytes <= caps.dump_bytes


def too_many_mismatches(verdicts: int, mismatches: int, *, limit: float, least: int) -> bool:
    """Whether the share of mismatches is over `limit`, or will be whatever follows, once there are `least` verdicts.

    Each mismatch is a verdict, also where fewer verdicts were counted: a limit of 1 is never passed.
    """
    return mismatches - limit * max(verdicts, mismatches, least) > _ROUNDING


def feed_size(window: int, waiting: int, batch: int) -> int:
    """How many further samples to make pending: up to the window, in batches, never less than zero."""
    return max(0, min(batch, window - waiting))

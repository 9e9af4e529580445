"""Which leases count as lapsed: a pure decision, on the clock of Redis."""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True, kw_only=True)
class Patience:
    """What the reaper knows about Redis, as far as its leases go. Times are seconds of Redis TIME.

    A lease that lapsed says that whoever works had the time to renew it and did not. Nobody had it while Redis was
    away or everything stood still. So after a start, an absence, another life of the server or a `silence`, no lease
    counts until for `wait` seconds, the longest lease, everybody could have renewed again.
    """

    wait: float
    silence: float
    server: str = ""
    since: float = 0.0
    last: float = 0.0

    def begun(self, server: str, now: float) -> Patience:
        """A pass begins: this life of the server answered, at this time."""
        calm = server == self.server and 0 <= now - self.last <= self.silence
        return replace(self, server=server, since=self.since if calm else now, last=now)

    def ended(self, now: float) -> Patience:
        """The pass ended: what it took was no silence."""
        return replace(self, last=now)

    def lost(self) -> Patience:
        """Redis went away."""
        return replace(self, server="")

    @property
    def lapsed_before(self) -> float:
        """Leases that ended before this time have lapsed: when the pass began, so that none does meanwhile; or 0."""
        return self.last if self.last - self.since >= self.wait else 0.0

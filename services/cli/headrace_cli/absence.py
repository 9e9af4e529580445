"""How long what was there may be away before it counts as gone."""

from __future__ import annotations

from dataclasses import dataclass

# For a run that a dispatcher can bring back: after a FLUSHALL it takes a look of the reaper and a rebuild.
GONE_SECONDS = 15.0


@dataclass(slots=True)
class Absence:
    """One absence after another of one thing, each of at most `patience` seconds."""

    patience: float
    _since: float | None = None

    def ended(self) -> None:
        """It is there, or why it is not has changed."""
        self._since = None

    def too_long(self, now: float) -> bool:
        """Whether it has been away for longer than that, `now` in seconds of any one clock; begins an absence."""
        if self._since is None:
            self._since = now
        return now - self._since > self.patience

"""What forwards cost the scheduler's thread: the latest of them, in a list of fixed size."""

from __future__ import annotations

_SAMPLES = 1024


class Meter:
    """Seconds that captured forwards took, and that they waited for room; written by one thread, read by any."""

    def __init__(self) -> None:
        self._seconds = [0.0] * _SAMPLES
        self.forwards = 0
        self.waited = 0.0

    def add(self, seconds: float) -> None:
        """A forward took so long."""
        self._seconds[self.forwards % _SAMPLES] = seconds
        self.forwards += 1

    def quantiles(self) -> tuple[float, float, float]:
        """Median, 99th percentile and largest of the latest forwards, in seconds; 0 before the first."""
        latest = sorted(self._seconds[: min(self.forwards, _SAMPLES)])
        if not latest:
            return 0.0, 0.0, 0.0
        return latest[len(latest) // 2], latest[len(latest) * 99 // 100], latest[-1]

"""Whether a run's latest verdicts are reason to pause it: a pure decision, and how it is said."""

from __future__ import annotations

from dataclasses import dataclass

from headrace.bus.values import Window
from headrace.flow import too_many_mismatches

_NAMED = 3  # reasons, the most frequent ones


@dataclass(frozen=True, slots=True, kw_only=True)
class MismatchLimit:
    """At most this share of first attempts may be mismatches, over at least so many of them; 1 allows all."""

    share: float
    least: int

    def passed_by(self, window: Window) -> str:
        """Why a run with this window is to be paused; empty when it is not."""
        if not too_many_mismatches(window.verdicts, window.mismatches, limit=self.share, least=self.least):
            return ""
        rate = 100 * window.mismatches / window.judged
        most = sorted(window.reasons.items(), key=lambda entry: (-entry[1], entry[0]))[:_NAMED]
        why = ", ".join(f"{reason} {count}" for reason, count in most)
        over = f" of at least {self.least}" if window.judged < self.least else ""
        return (
            f"mismatch rate {rate:.1f} % of the last {window.judged} samples' first attempts ({why}), "
            f"limit {100 * self.share:g} %{over}"
        )

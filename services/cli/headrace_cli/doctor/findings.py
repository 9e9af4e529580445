"""What the doctor found, one finding a check, and what they come to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from headrace.errors import Conflict, HeadraceError, Unavailable, UsageError, VerificationFailed

# What is wrong worst is what the command ends with.
_WORST_FIRST = (VerificationFailed, Conflict, UsageError, Unavailable)


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One check: what was looked at, and what to do when it is not well.

    `ok` is None where it cannot be told from here; `fix` says then how to check it. `error` is what the command ends
    with where it is False.
    """

    what: str
    ok: bool | None
    fix: str = ""
    error: type[HeadraceError] = Unavailable


def well(what: str) -> Finding:
    """A check that found nothing to change."""
    return Finding(what=what, ok=True)


def wrong(what: str, fix: str, error: type[HeadraceError] = Unavailable) -> Finding:
    """A check that found something to change."""
    return Finding(what=what, ok=False, fix=fix, error=error)


def unchecked(what: str, how: str) -> Finding:
    """Something that cannot be told from here, and how to check it."""
    return Finding(what=what, ok=None, fix=how)


def conclude(findings: Sequence[Finding], url: str) -> str:
    """The last line about the engine at `url`: yes, as far as it could be told.

    Raises:
        HeadraceError: something needs a change; which error it is says what is wrong worst, its message the first step.
    """
    bad = [finding for finding in findings if finding.ok is False]
    if bad:
        worst = min(bad, key=lambda finding: _rank(finding.error))
        more = f" (and {len(bad) - 1} more, see above)" if len(bad) > 1 else ""
        raise worst.error(f"no: {worst.what}: {worst.fix}{more}")
    open_ones = [finding.what for finding in findings if finding.ok is None]
    if open_ones:
        return f"yes for {url}, but for what cannot be told from here: {'; '.join(open_ones)}"
    return f"yes: {url} serves headrace, and what it stores is what it computes"


def _rank(error: type[HeadraceError]) -> int:
    return next((rank for rank, kind in enumerate(_WORST_FIRST) if issubclass(error, kind)), len(_WORST_FIRST))

"""Makes the manifest's lines: of stored rows, and of samples that have none."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from datetime import UTC, datetime, timedelta

from headrace.manifest import Line
from headrace.messages import Record
from headrace.runs import RunSpec
from headrace_writer.rows import Due, StoredRow

PROOF_BY_IDS = "ids"
_AT = "%Y-%m-%dT%H:%M:%SZ"


def line_of_row(spec: RunSpec, due: Due, row: StoredRow, at: datetime) -> Line:
    """The line that commits a row."""
    return Line(
        ordinal=due.request.ordinal,
        sample=due.sample,
        status="stored",
        reason="",
        request=row.request,
        tokens=due.request.tokens,
        path=str(row.path),
        bytes=row.size,
        checksum=row.checksum,
        boundaries=spec.boundaries,
        proof=PROOF_BY_IDS,
        at=_seconds(at),
    )


def line_without_row(spec: RunSpec, entry: Record, at: datetime) -> Line:
    """The line of a sample that was rejected, or has failed."""
    return Line(
        ordinal=entry.ordinal,
        sample=entry.sample,
        status=entry.status,
        reason=entry.reason,
        request=entry.request,
        tokens=entry.tokens,
        path="",
        bytes=0,
        checksum="",
        boundaries=spec.boundaries,
        proof="",
        at=_seconds(at),
    )


def later(lines: Sequence[Line], at: datetime) -> datetime:
    """The time for a sample's next line: later than its others, whose writers' clocks may be ahead of this one."""
    for line in lines:
        with suppress(ValueError, OverflowError):
            at = max(at, datetime.strptime(line.at, _AT).replace(tzinfo=UTC) + timedelta(seconds=1))
    return at


def _seconds(at: datetime) -> str:
    return at.astimezone(UTC).strftime(_AT)

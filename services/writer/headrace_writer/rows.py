"""Publishes rows, and takes over the rows that are there already, on their own evidence."""

from __future__ import annotations

import os
import stat
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np

from headrace.dumpfolder import open_nofollow
from headrace.errors import InvalidId, Unavailable, Unreadable
from headrace.ids import RequestId
from headrace.masks import decode_mask
from headrace.verdicts import Requirement
from headrace_writer.destination import Destination, file_checksum, guard
from headrace_writer.formats.base import STATE_DTYPES, Format, Origin, Row, RowSource, States, map_row

SCAN_BYTES = 4 << 20

# Without its sign a value's bits order like the value: 0 is zero, and from here on it is infinite or NaN.
_BITS = {"BF16": ("<u2", 0x7FFF, 0x7F80), "F16": ("<u2", 0x7FFF, 0x7C00), "F32": ("<u4", 0x7FFFFFFF, 0x7F800000)}


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredRow:
    """A row in its place: path relative to the dataset, size in bytes, checksum of the file, whose states it holds."""

    path: PurePosixPath
    size: int
    checksum: str
    request: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Due:
    """Whose row belongs into a place: `request` is any attempt of the sample, `mask` its loss mask as run lengths."""

    request: RequestId
    sample: str
    mask: tuple[int, ...]


def publish_row(destination: Destination, form: Format, source: RowSource) -> StoredRow | None:
    """Publish a row; None when its place is taken.

    Raises:
        DestinationFull, Unavailable: nothing was published, or not for certain.
    """
    path = form.path(source.request.ordinal)
    published = destination.publish(path, lambda file: form.write(source, file))
    if published is None:
        return None
    return StoredRow(path=path, size=published.size, checksum=published.checksum, request=str(source.request))


def adopt_row(destination: Destination, form: Format, due: Due, requirement: Requirement) -> StoredRow | None:
    """Verify a row that is there and make it last; a wrong one goes to quarantine.

    Returns:
        The row, or None when there is none (any more).

    Raises:
        DestinationFull, Unavailable: the folder cannot be used now.
    """
    path = form.path(due.request.ordinal)
    place = destination.folder / path
    with guard(place):
        try:
            found = place.lstat()
            if stat.S_ISREG(found.st_mode):
                # Opened once: size, checksum and content are those of one file, whatever comes to its place.
                with _open(place) as file:
                    found, data = os.fstat(file.fileno()), map_row(file)
                row = form.parse(place.name, data)
                problem = unsound(row, due, requirement)
                if problem is None:
                    # Its line is not there yet: from here on the line's checksum vouches for what the file holds.
                    form.check_sums(place.name, data)
            else:
                problem = "not a regular file"
        except FileNotFoundError:
            return None
        except Unreadable as error:
            problem = str(error)
    if problem is not None:
        note = {"request": str(due.request), "sample": due.sample, "problem": problem}
        destination.quarantine(path, found, note)
        return None
    destination.make_entry_last(path)
    request = row.origin.request if row.origin else str(due.request)
    return StoredRow(path=path, size=found.st_size, checksum=file_checksum(data), request=request)


def _open(place: Path) -> Any:
    try:
        return open_nofollow(place)
    except Unreadable as error:
        # A regular file that cannot be opened says nothing of its content.
        raise Unavailable(f"{place} cannot be read: {error}; see its permissions") from error


def unsound(row: Row, due: Due, requirement: Requirement) -> str | None:
    """Say what is wrong with a row, going by its own content and never by a dump: bf16 differs between batches."""
    request = due.request
    aux, final = row.aux.info, row.final.info
    shapes = (
        (request.tokens, len(requirement.boundaries) * requirement.hidden_size),
        (request.tokens, requirement.hidden_size),
    )
    if not request.proves(row.token_ids):
        return f"its {len(row.token_ids) // 8} token ids are not the sample's {request.tokens}"
    if row.loss_mask != decode_mask(due.mask):
        return "its loss mask is not the sample's"
    if (aux.shape, final.shape) != shapes:
        return f"aux {aux.shape}, final {final.shape}, expected {shapes}"
    if aux.dtype != final.dtype or aux.dtype not in STATE_DTYPES:
        return f"aux is {aux.dtype}, final is {final.dtype}"
    return (
        (row.origin and _foreign(row.origin, due, requirement))
        or _bad_values("aux", row.aux, requirement.hidden_size)
        or _bad_values("final", row.final, requirement.hidden_size)
    )


def _foreign(origin: Origin, due: Due, requirement: Requirement) -> str | None:
    request, identity = due.request, requirement.identity
    try:
        own = RequestId.parse(origin.request)
    except InvalidId as error:
        return str(error)
    pairs = [
        ("run", origin.run, request.run),
        ("ordinal", origin.ordinal, request.ordinal),
        ("sample", origin.sample, due.sample),
        ("request", (own.run, own.ordinal, own.digest), (request.run, request.ordinal, request.digest)),
        ("boundaries", origin.boundaries, requirement.boundaries),
        ("final state", origin.final_state, requirement.final_state),
    ]
    if identity is not None:
        pairs.append(("engine", origin.engine, identity.engine))
        pairs.append(("weights", origin.weight_version, identity.weight_version))
    return next((f"{name} {found!r}, expected {due!r}" for name, found, due in pairs if found != due), None)


def _bad_values(name: str, states: States, hidden_size: int) -> str | None:
    """Look for values that are NaN or infinite and for rows of one boundary that are all zeros, a few MiB at a time."""
    dtype, magnitude, infinite = _BITS[states.info.dtype]
    rows = np.frombuffer(states.buffer, dtype).reshape(states.info.shape[0], -1, hidden_size)
    step = max(1, SCAN_BYTES // max(1, rows[:1].nbytes))
    for start in range(0, len(rows), step):
        largest = (rows[start : start + step] & magnitude).max(axis=-1)
        if (largest >= infinite).any():
            return f"{name} holds values that are NaN or infinite"
        if (largest == 0).any():
            return f"{name} holds a row that is all zeros"
    return None

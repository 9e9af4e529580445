"""Publishes rows, and takes over the rows that are there already, on their own evidence."""

from __future__ import annotations

import mmap
import os
import stat
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import numpy as np

from headrace.dumpfolder import open_nofollow
from headrace.errors import InvalidId, Unavailable, Unreadable
from headrace.ids import RequestId
from headrace.masks import decode_mask
from headrace.messages import StoreJob
from headrace.verdicts import Requirement
from headrace_writer.destination import Destination, file_checksum, guard
from headrace_writer.formats.base import STATE_DTYPES, Format, Origin, Row, RowSource, States

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


def adopt_row(destination: Destination, form: Format, job: StoreJob, requirement: Requirement) -> StoredRow | None:
    """Verify a row that is there and make it last; a wrong one goes to quarantine.

    Returns:
        The row, or None when there is none (any more).

    Raises:
        DestinationFull, Unavailable: the folder cannot be used now.
    """
    path = form.path(job.id.ordinal)
    place = destination.folder / path
    with guard(place):
        try:
            found = place.lstat()
            row = _read(place, found, form)
            checksum = file_checksum(_map(place))
        except FileNotFoundError:
            return None
        except Unreadable as error:
            problem: str | None = str(error)
        else:
            problem = unsound(row, job, requirement)
    if problem is not None:
        destination.quarantine(path, found, {"request": job.request, "sample": job.sample, "problem": problem})
        return None
    destination.make_entry_last(path)
    request = row.origin.request if row.origin else job.request
    return StoredRow(path=path, size=found.st_size, checksum=checksum, request=request)


def _read(place: Path, found: os.stat_result, form: Format) -> Row:
    if not stat.S_ISREG(found.st_mode):
        raise Unreadable("not a regular file")
    try:
        return form.read(place)
    except Unreadable as error:
        # A regular file that cannot be opened says nothing of its content.
        if isinstance(error.__cause__, OSError):
            raise Unavailable(f"{place} cannot be read: {error}; see its permissions") from error
        raise


def _map(place: Path) -> memoryview:
    with open_nofollow(place) as file:
        return memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))


def unsound(row: Row, job: StoreJob, requirement: Requirement) -> str | None:
    """Say what is wrong with a row, going by its own content and never by a dump: bf16 differs between batches."""
    request = job.id
    aux, final = row.aux.info, row.final.info
    shapes = (
        (request.tokens, len(requirement.boundaries) * requirement.hidden_size),
        (request.tokens, requirement.hidden_size),
    )
    if not request.proves(row.token_ids):
        return f"its {len(row.token_ids) // 8} token ids are not the sample's {request.tokens}"
    if row.loss_mask != decode_mask(job.mask):
        return "its loss mask is not the sample's"
    if (aux.shape, final.shape) != shapes:
        return f"aux {aux.shape}, final {final.shape}, expected {shapes}"
    if aux.dtype != final.dtype or aux.dtype not in STATE_DTYPES:
        return f"aux is {aux.dtype}, final is {final.dtype}"
    return (
        (row.origin and _foreign(row.origin, job, requirement))
        or _bad_values("aux", row.aux, requirement.hidden_size)
        or _bad_values("final", row.final, requirement.hidden_size)
    )


def _foreign(origin: Origin, job: StoreJob, requirement: Requirement) -> str | None:
    request, identity = job.id, requirement.identity
    try:
        own = RequestId.parse(origin.request)
    except InvalidId as error:
        return str(error)
    pairs = [
        ("run", origin.run, request.run),
        ("ordinal", origin.ordinal, request.ordinal),
        ("sample", origin.sample, job.sample),
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

"""Checks one row: its file against its line, its content against the inputs, the run and itself."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import xxhash

from headrace.dumpfolder import open_nofollow
from headrace.dumps import CHECKSUM_PREFIX
from headrace.errors import InvalidId, Unreadable
from headrace.ids import RequestId, encode_ids
from headrace.manifest import Line
from headrace.masks import decode_mask
from headrace_cli.verify.books import Books, Entry
from headrace_cli.verify.problems import Kind
from headrace_dispatcher.inputs import RejectedSample, Sample
from headrace_writer.formats.base import Row, States

CHUNK = 1 << 20

# By dtype: the bits as an unsigned integer, all but the sign, and the smallest magnitude that is no number. For
# IEEE 754 and bfloat16 magnitudes order like their bits.
_BITS = {"BF16": ("<u2", 0x7FFF, 0x7F80), "F16": ("<u2", 0x7FFF, 0x7C00), "F32": ("<u4", 0x7FFFFFFF, 0x7F800000)}

Fault = tuple[Kind, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Checked:
    """What the check of one row found.

    `size` is the file's bytes, 0 when it is not there; `tokens` N, 0 unless the row is without fault.
    """

    faults: tuple[Fault, ...]
    size: int
    tokens: int


def check_row(books: Books, ordinal: int, entries: Sequence[Entry], sample: Sample | RejectedSample | None) -> Checked:
    """Check the row of a stored sample.

    Args:
        books: the dataset's.
        ordinal: the sample's.
        entries: its `stored` lines, at least one; the one that matches the file counts.
        sample: what the inputs say of it, None where they cannot be read.
    """
    place = books.folder / books.form.path(ordinal)
    try:
        size, checksum = _measure(place)
    except FileNotFoundError:
        return _checked([(Kind.MISSING_ROW, "its line says stored, the row is not there")], 0)
    except (Unreadable, OSError) as error:
        return _checked([(Kind.UNREADABLE, str(error))], 0)
    matching = [entry for entry in entries if (entry.line.bytes, entry.line.checksum) == (size, checksum)]
    entry = (matching or entries)[0]
    faults = [] if matching else [_file_fault(entries, size, checksum)]
    try:
        row = books.form.read(place)
    except (Unreadable, OSError) as error:
        kind, detail = faults[0] if faults else (Kind.UNREADABLE, "the file is what its line says")
        return _checked([(kind, f"{detail}; {error}")], size)
    owner = _owner(books, row, ordinal, sample)
    if owner is not None:
        detail = f"holds the row of ordinal {owner} ({books.form.path(owner)}), by its own token ids"
        return _checked([(Kind.SWAPPED, detail)], size)
    faults += _content_faults(books, row, entry.line, sample)
    return _checked(faults, size, len(row.token_ids) // 8)


def _checked(faults: list[Fault], size: int, tokens: int = 0) -> Checked:
    return Checked(faults=tuple(faults), size=size, tokens=0 if faults else tokens)


def _measure(place: Path) -> tuple[int, str]:
    """Size and xxh3 of a file, a chunk at a time; a link is not followed."""
    digest, size = xxhash.xxh3_64(), 0
    with open_nofollow(place) as file:
        buffer = bytearray(CHUNK)
        while count := file.readinto(buffer):
            digest.update(memoryview(buffer)[:count])
            size += count
    return size, CHECKSUM_PREFIX + digest.hexdigest()


def _file_fault(entries: Sequence[Entry], size: int, checksum: str) -> Fault:
    if len(entries) > 1:
        said = ", ".join(f"{entry.line.bytes} bytes of {entry.line.checksum} ({entry.where})" for entry in entries)
        return Kind.CONTRADICTION, f"{size} bytes of {checksum} match none of its lines: {said}"
    line = entries[0].line
    if line.bytes != size:
        return Kind.SIZE, f"{size} bytes, its line says {line.bytes}"
    return Kind.CHECKSUM, f"{checksum}, its line says {line.checksum}"


def _owner(books: Books, row: Row, ordinal: int, sample: Sample | RejectedSample | None) -> int | None:
    """The other sample that the row belongs to, by the proof in its metadata or, without one, in a manifest line."""
    if row.origin is not None:
        try:
            own = RequestId.parse(row.origin.request)
        except InvalidId:
            own = None
        if own is not None and own.run == books.spec.run and own.proves(row.token_ids):
            return own.ordinal if own.ordinal != ordinal and 0 <= own.ordinal < books.spec.total else None
    if isinstance(sample, Sample) and encode_ids(sample.ids) != row.token_ids:
        owner = books.owner(row.token_ids)
        return owner if owner != ordinal else None
    return None


def _content_faults(books: Books, row: Row, line: Line, sample: Sample | RejectedSample | None) -> Iterator[Fault]:
    yield from _ids_faults(row, line, sample)
    shape = _shape_fault(books, row, len(row.token_ids) // 8)
    if shape is not None:
        yield Kind.SHAPE, shape
    else:
        yield from _value_faults([f"boundary {b}" for b in books.spec.boundaries], row.aux)
        yield from _value_faults(["the final state"], row.final)
    yield from _origin_faults(books, row, line)


def _ids_faults(row: Row, line: Line, sample: Sample | RejectedSample | None) -> Iterator[Fault]:
    if isinstance(sample, Sample):
        expected = encode_ids(sample.ids)
        if row.token_ids != expected:
            yield Kind.TOKEN_IDS, _first_difference(row.token_ids, expected)
        if row.loss_mask != decode_mask(sample.mask):
            found, due = sum(row.loss_mask), sum(sample.mask[1::2])
            yield Kind.LOSS_MASK, f"trains {found} of {len(row.loss_mask)} tokens, not the {due} of the inputs' mask"
        return
    try:
        proven = RequestId.parse(line.request).proves(row.token_ids)
    except InvalidId:
        return  # the line's fault
    if not proven:
        yield Kind.TOKEN_IDS, f"not the ones that {line.request} was made from"
    if len(row.loss_mask) * 8 != len(row.token_ids):
        yield Kind.LOSS_MASK, f"covers {len(row.loss_mask)} of {len(row.token_ids) // 8} tokens"


def _first_difference(found: bytes, expected: bytes) -> str:
    mine, due = np.frombuffer(found, "<i8"), np.frombuffer(expected, "<i8")
    both = min(len(mine), len(due))
    differing = np.flatnonzero(mine[:both] != due[:both])
    first = int(differing[0]) if len(differing) else both
    return f"{len(mine)} token ids, not the {len(due)} of the inputs: they differ from token {first} on"


def _shape_fault(books: Books, row: Row, tokens: int) -> str | None:
    width, count = books.spec.hidden_size, len(books.spec.boundaries)
    found = (row.aux.info.shape, row.final.info.shape)
    expected = ((tokens, count * width), (tokens, width))
    if found != expected:
        return f"aux {found[0]}, final {found[1]}, expected {expected[0]} and {expected[1]}"
    dtypes = (row.aux.info.dtype, row.final.info.dtype)
    if dtypes[0] != dtypes[1] or dtypes[0] not in _BITS:
        return f"aux is {dtypes[0]}, final is {dtypes[1]}"
    return None


def _value_faults(names: Sequence[str], states: States) -> Iterator[Fault]:
    """Look for vectors [D] with values that are NaN or infinite, or that are all zeros, a chunk at a time."""
    dtype, magnitude, infinite = _BITS[states.info.dtype]
    vectors = np.frombuffer(states.buffer, dtype).reshape(states.info.shape[0], len(names), -1)
    step = max(1, CHUNK // max(1, vectors[:1].nbytes))
    found: dict[Kind, tuple[int, str]] = {}
    for start in range(0, len(vectors), step):
        largest = (vectors[start : start + step] & magnitude).max(axis=-1)
        for kind, bad in ((Kind.NOT_FINITE, largest >= infinite), (Kind.ZERO_ROW, largest == 0)):
            if bad.any():
                token, name = np.argwhere(bad)[0]
                count, first = found.get(kind, (0, f"token {start + token} at {names[name]}"))
                found[kind] = count + int(bad.sum()), first
    text = {Kind.NOT_FINITE: "hold values that are NaN or infinite", Kind.ZERO_ROW: "are all zeros"}
    for kind, (count, first) in found.items():
        yield kind, f"{count} of {len(vectors) * len(names)} state vectors {text[kind]}, the first: {first}"


def _origin_faults(books: Books, row: Row, line: Line) -> Iterator[Fault]:
    origin, spec, identity = row.origin, books.spec, books.identity
    if origin is None:
        return
    pairs: list[tuple[str, object, object]] = [
        ("run", origin.run, spec.run),
        ("ordinal", origin.ordinal, line.ordinal),
        ("sample", origin.sample, line.sample),
        ("request", origin.request, line.request),
        ("boundaries", origin.boundaries, spec.boundaries),
        ("final state", origin.final_state, books.final_state),
        ("model", origin.model, spec.engine_model),
    ]
    if identity is not None:
        pairs.append(("engine", origin.engine, identity.engine))
        pairs.append(("weights", origin.weight_version, identity.weight_version))
    differing = [f"{name} {found!r}, expected {due!r}" for name, found, due in pairs if found != due]
    if differing:
        yield Kind.ORIGIN, "its metadata say " + "; ".join(differing)

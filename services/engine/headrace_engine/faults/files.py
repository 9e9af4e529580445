"""Spoils a dump that is whole before its name is linked: what a faulty disk, core or server would publish."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import xxhash

from headrace import logs
from headrace.dumpfolder import read_dump
from headrace.dumps import CHECKSUM_PREFIX, DUMP_SUFFIX, DumpHeader
from headrace.ids import RequestId
from headrace.tensorfile import layout
from headrace_capture.folder import Folder
from headrace_engine.faults.log import Hits
from headrace_engine.faults.plan import Kind

_log = logs.get(__name__)

GHOST = "ghost"  # a run that nobody submitted


@dataclass(frozen=True, slots=True, kw_only=True)
class Contents:
    """A whole dump: its header, whose checksum may be out of date, and the bytes of each tensor."""

    header: DumpHeader
    tensors: Mapping[str, bytes]

    @classmethod
    def read(cls, path: Path) -> Contents:
        """Read a sealed file."""
        dump, data = read_dump(path), path.read_bytes()
        tensors = {
            name: data[dump.data_offset + info.begin : dump.data_offset + info.end]
            for name, info in dump.header.tensors.items()
        }
        return cls(header=dump.header, tensors=tensors)

    def write(self, path: Path) -> None:
        """Write the file anew, with the checksum of its data."""
        data = b"".join(self.tensors.values())
        checksum = CHECKSUM_PREFIX + xxhash.xxh3_64_hexdigest(data)
        path.write_bytes(replace(self.header, checksum=checksum).encode() + data)

    def cut(self, *, rows: int, parts: int = 1) -> Contents:
        """Keep the first `rows` rows, and of each state's values the first of `parts` equal parts."""
        shapes, tensors = [], {}
        for name, info in self.header.tensors.items():
            width = info.nbytes // info.shape[0]
            kept = width if name == "token_ids" else width // parts
            data = self.tensors[name]
            tensors[name] = b"".join(data[row * width : row * width + kept] for row in range(rows))
            shapes.append((name, info.dtype, (rows, *(size * kept // width for size in info.shape[1:]))))
        return Contents(header=replace(self.header, tokens=rows, tensors=layout(shapes)), tensors=tensors)


def _torn(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def _flipped(path: Path) -> None:
    dump = read_dump(path)
    with path.open("r+b") as file:
        place = dump.data_offset + dump.header.tensors["final"].begin
        file.seek(place)
        byte = file.read(1)[0]
        file.seek(place)
        file.write(bytes([byte ^ 1]))


def _short(path: Path) -> None:
    contents = Contents.read(path)
    contents.cut(rows=contents.header.tokens - 1).write(path)


def _other_boundaries(path: Path) -> None:
    contents = Contents.read(path)
    old = contents.header
    stats = tuple(
        entry if entry.layer == "final" else replace(entry, layer=str(int(entry.layer) + 1)) for entry in old.stats
    )
    header = replace(old, boundaries=tuple(boundary + 1 for boundary in old.boundaries), stats=stats)
    replace(contents, header=header).write(path)


def _other_shape(path: Path) -> None:
    contents = Contents.read(path)
    contents.cut(rows=contents.header.tokens, parts=2).write(path)


def _other_engine(path: Path) -> None:
    contents = Contents.read(path)
    replace(contents, header=replace(contents.header, engine=f"other {contents.header.engine}")).write(path)


def _unknown_run(path: Path) -> None:
    contents = Contents.read(path)
    request = _ghost(contents.header.request)
    replace(contents, header=replace(contents.header, request=request)).write(path)


_SPOILS: Mapping[Kind, Callable[[Path], None]] = {
    Kind.TORN: _torn,
    Kind.FLIPPED: _flipped,
    Kind.SHORT: _short,
    Kind.OTHER_BOUNDARIES: _other_boundaries,
    Kind.OTHER_SHAPE: _other_shape,
    Kind.OTHER_ENGINE: _other_engine,
    Kind.UNKNOWN_RUN: _unknown_run,
}


class SpoilingFolder(Folder):
    """A dump folder that spoils or delays the dumps of requests that a plan hits."""

    def __init__(self, path: Path, boot: str, hits: Hits) -> None:
        """As `Folder`."""
        self._hits = hits
        self._lock_late = threading.Lock()
        self._late: dict[str, tuple[str, threading.Timer]] = {}  # by hidden name: the name to come
        super().__init__(path, boot)

    def publish(self, hidden: str, name: str) -> bool:
        """Give a finished hidden file its name; a late one gets it later, and is taken for published meanwhile."""
        request = name.removesuffix(DUMP_SUFFIX)
        fault = self._hits.of(request)
        if fault is None or not name.endswith(DUMP_SUFFIX):
            return super().publish(hidden, name)
        if fault.kind is Kind.LATE:
            timer = threading.Timer(fault.seconds, self._link_late, (hidden,))
            timer.daemon = True
            with self._lock_late:
                self._late[hidden] = name, timer
            timer.start()
            return True
        if fault.kind in _SPOILS:
            _SPOILS[fault.kind](self.path / hidden)
        if fault.kind is Kind.UNKNOWN_RUN:
            name = _ghost(request) + DUMP_SUFFIX
        return super().publish(hidden, name)

    def close(self) -> None:
        """Publish what is late at once, then close."""
        with self._lock_late:
            waiting = dict(self._late)
        for hidden, (_, timer) in waiting.items():
            timer.cancel()
            self._link_late(hidden)
        super().close()

    def _link_late(self, hidden: str) -> None:
        with self._lock_late:  # held while the name is linked: the folder is not closed meanwhile
            name, _ = self._late.pop(hidden, ("", None))
            if not name:  # the engine ends, and was first
                return
            try:
                super().publish(hidden, name)
            except OSError as error:
                _log.warning("a late dump cannot be published", name=name, error=str(error))


def _ghost(request: str) -> str:
    """The id that the request would have in a run that nobody submitted."""
    return str(replace(RequestId.parse(request), run=GHOST))

"""Appends to the manifest, and knows which samples have a line in it."""

from __future__ import annotations

import os
import re
from collections.abc import Set
from pathlib import Path

from headrace.manifest import MANIFEST_FOLDER, SEGMENT_SUFFIX, STATUSES, Damage, Line, ManifestReader, Status
from headrace.publish import fsync_folder
from headrace_writer.destination import DestinationFull, guard


class ManifestWriter:
    """Appends lines to a segment of this writer's own, made with the first line.

    After a failed or short append the segment is left as it is and a new one is opened, so a torn tail is never
    continued. A line whose append failed may be there all the same: to append it again does no harm.
    """

    def __init__(self, folder: Path, writer: str) -> None:
        """Append to `folder`/manifest/{time of the segment's first line}-{writer}.jsonl."""
        self._folder = folder / MANIFEST_FOLDER
        self._writer = writer
        self._opened = 0
        self._descriptor: int | None = None
        self._path = self._folder

    def append(self, *lines: Line) -> None:
        """Append lines with one write and make them last.

        Raises:
            DestinationFull, Unavailable: they may be there or not; append them again.
        """
        if not lines:
            return
        with guard(self._folder):
            if self._descriptor is None:
                self._descriptor = self._open(lines[0].at)
            try:
                self._write(self._descriptor, b"".join(line.encode() for line in lines))
            except (OSError, DestinationFull):
                self._abandon(self._descriptor)
                raise

    def close(self) -> None:
        """Close the segment; a later append opens a new one."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def _abandon(self, descriptor: int) -> None:
        try:
            # Tries on a full disk would otherwise leave an empty segment each.
            if os.fstat(descriptor).st_size == 0:
                self._path.unlink()
        finally:
            self.close()

    def _write(self, descriptor: int, data: bytes) -> None:
        written = os.write(descriptor, data)
        if written != len(data):
            raise DestinationFull(f"{self._folder}: {written} of {len(data)} bytes fit; free some room there")
        os.fsync(descriptor)

    def _open(self, at: str) -> int:
        self._folder.mkdir(exist_ok=True)
        fsync_folder(self._folder.parent)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC
        stamp = re.sub(r"[^0-9TZ]", "", at)
        while True:
            self._opened += 1
            suffix = f"-{self._opened}" if self._opened > 1 else ""
            self._path = self._folder / f"{stamp}-{self._writer}{suffix}{SEGMENT_SUFFIX}"
            try:
                descriptor = os.open(self._path, flags, 0o644)
            except FileExistsError:
                continue
            try:
                fsync_folder(self._folder)
            except OSError:
                os.close(descriptor)
                raise
            return descriptor


class ManifestIndex:
    """Which samples have a line, in one byte per sample; `refresh` reads what was appended since."""

    def __init__(self, folder: Path, total: int) -> None:
        """Index `folder`/manifest for ordinals below `total`; nothing is read yet."""
        self._folder = folder
        self._reader = ManifestReader(folder)
        self._seen = bytearray(total)
        self._lasting: dict[str, int] = {}

    def refresh(self) -> None:
        """Take in the lines that any writer completed since the last call; damaged ones count as absent."""
        with guard(self._folder):
            for line in self._reader.read_new():
                if not isinstance(line, Damage) and 0 <= line.ordinal < len(self._seen):
                    self._seen[line.ordinal] |= 1 << STATUSES.index(line.status)

    def status(self, ordinal: int) -> Status | None:
        """The status of a sample's lines, None without one; `stored` wins over the others."""
        seen = self._seen[ordinal]
        return next((status for bit, status in enumerate(STATUSES) if seen & 1 << bit), None)

    def find(self, ordinal: int) -> list[Line]:
        """Every line of a sample, by a scan of the whole manifest."""
        return self.find_all({ordinal}).get(ordinal, [])

    def find_all(self, ordinals: Set[int]) -> dict[int, list[Line]]:
        """Every line of several samples, by one scan of the whole manifest."""
        # Decoding takes the time: lines that name another ordinal, as `Line.encode` spells it, are passed over.
        mentioning = f'"ordinal":{next(iter(ordinals))},'.encode() if len(ordinals) == 1 else b""
        found: dict[int, list[Line]] = {}
        with guard(self._folder):
            for line in ManifestReader(self._folder).read_new(mentioning):
                if not isinstance(line, Damage) and line.ordinal in ordinals:
                    found.setdefault(line.ordinal, []).append(line)
        return found

    def make_last(self) -> None:
        """Make every line last that is there: the writer that appended one may have died before it did so itself.

        Raises:
            DestinationFull, Unavailable: what was found may be lost with the machine: look again later.
        """
        folder = self._folder / MANIFEST_FOLDER
        with guard(folder):
            for path in folder.glob(f"*{SEGMENT_SUFFIX}"):
                descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
                try:
                    size = os.fstat(descriptor).st_size
                    if self._lasting.get(path.name) != size:
                        os.fsync(descriptor)
                        self._lasting[path.name] = size
                finally:
                    os.close(descriptor)
            fsync_folder(folder)

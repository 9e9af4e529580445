"""The dataset's folder as a place where files appear whole or not at all, and last once they are there."""

from __future__ import annotations

import errno
import fcntl
import io
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import orjson
import xxhash

from headrace.dumps import CHECKSUM_PREFIX
from headrace.errors import Conflict, Unavailable
from headrace.publish import fsync_folder

SCRATCH_FOLDER = ".tmp"
QUARANTINE_FOLDER = ".quarantine"
LOCK_FILE = "lock"
# Small enough that what was hashed is still in the processor's cache when it is written.
CHUNK = 1 << 20
WRITEBACK = 8 << 20


class DestinationFull(Unavailable):
    """The destination has no room or no quota left; free some, and the same call goes on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Published:
    """A file that is in place: its size in bytes and its checksum, xxh3-64 over the whole file."""

    size: int
    checksum: str


@contextmanager
def guard(place: Path) -> Iterator[None]:
    """Turn errors of the file system at `place` into DestinationFull (ENOSPC, EDQUOT) or Unavailable."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise DestinationFull(f"{place}: {error.strerror}; free some room there") from error
        hint = "the destination must be mounted, writable, and know hard links and locks"
        raise Unavailable(f"{place}: {error.strerror or error}; {hint}") from error


def file_checksum(*parts: bytes | memoryview) -> str:
    """Checksum bytes, given in parts, as manifests and dumps spell it: `xxh3:` and 16 hex digits."""
    digest = xxhash.xxh3_64()
    for part in parts:
        digest.update(part)
    return CHECKSUM_PREFIX + digest.hexdigest()


class HashingFile(io.RawIOBase):
    """A new file that only appends, and knows the position, the checksum and the size of what was written."""

    def __init__(self, path: Path) -> None:
        """Create `path`; raises FileExistsError."""
        super().__init__()
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        self._hash = xxhash.xxh3_64()
        self._size = 0
        self._sent = 0

    def writable(self) -> bool:
        """It is."""
        return True

    def tell(self) -> int:
        """Bytes written so far."""
        return self._size

    def write(self, data: Any) -> int:
        """Write all of a bytes-like object, in chunks."""
        view = memoryview(data).cast("B")
        for start in range(0, len(view), CHUNK):
            chunk = view[start : start + CHUNK]
            self._hash.update(chunk)
            while chunk:
                written = os.write(self._descriptor, chunk)
                chunk = chunk[written:]
                self._size += written
            if self._size - self._sent >= WRITEBACK:
                # Linux begins to write dirty pages back when told that they are not needed: the disk works
                # meanwhile, and the final fsync finds little left.
                os.posix_fadvise(self._descriptor, self._sent, self._size - self._sent, os.POSIX_FADV_DONTNEED)
                self._sent = self._size
        return len(view)

    def sync(self) -> Published:
        """Make the content last, and tell what it is."""
        os.fsync(self._descriptor)
        return Published(size=self._size, checksum=CHECKSUM_PREFIX + self._hash.hexdigest())

    def close(self) -> None:
        """Close the descriptor, once."""
        if self.closed:
            return
        super().close()
        os.close(self._descriptor)


class Destination:
    """One writer's hold on a dataset's folder.

    Its temporary files lie in `.tmp/{writer}/` under a lock that lasts as long as the process; the folders of
    writers whose lock can be taken are removed at the start.
    """

    def __init__(self, folder: Path, writer: str) -> None:
        """Take `.tmp/{writer}` in `folder`, which is made if need be.

        Raises:
            Conflict: a living process has this writer's name.
            DestinationFull, Unavailable: the folder cannot be written to.
        """
        self.folder = folder
        self.writer = writer
        self._scratch = folder / SCRATCH_FOLDER / writer
        self._count = 0
        self._lasting: set[Path] = set()
        with guard(folder):
            self._make_lasting(folder / SCRATCH_FOLDER)
            # One at a time, or a folder could be swept between its making and its locking.
            with _locked(folder / SCRATCH_FOLDER / LOCK_FILE):
                _sweep(folder / SCRATCH_FOLDER)
                self._scratch.mkdir(exist_ok=True)
                lock = _try_lock(self._scratch / LOCK_FILE)
        if lock is None:
            raise Conflict(f"{self._scratch} is held by a living writer; give each process a name of its own")
        self._lock = lock

    def close(self) -> None:
        """Remove the scratch folder and give up its lock."""
        shutil.rmtree(self._scratch, ignore_errors=True)
        os.close(self._lock)

    def publish(self, relative: PurePosixPath, write: Callable[[io.RawIOBase], object]) -> Published | None:
        """Publish a new file and make it last; None when the place is taken, which stays as it is.

        Raises:
            DestinationFull, Unavailable: nothing was published, or not for certain: look before the next try.
        """
        final = self.folder / relative
        self._count += 1
        # Trainers look for rows by their suffix, in every folder below the one that they are given.
        temporary = self._scratch / f"{self._count}-{final.name}.part"
        with guard(self.folder):
            self._make_lasting(final.parent)
            try:
                with HashingFile(temporary) as file:
                    write(file)
                    published = file.sync()
                try:
                    os.link(temporary, final)
                except FileExistsError:
                    return None
            except OSError:
                # A folder that was made may be what is missing now.
                self._lasting.clear()
                raise
            finally:
                with suppress(FileNotFoundError):
                    temporary.unlink()
            fsync_folder(final.parent)
        return published

    def make_entry_last(self, relative: PurePosixPath) -> None:
        """Make a file's place last that another process published, perhaps a moment ago."""
        with guard(self.folder):
            self._make_lasting((self.folder / relative).parent)
            fsync_folder((self.folder / relative).parent)

    def quarantine(self, relative: PurePosixPath, found: os.stat_result, note: dict[str, Any]) -> None:
        """Move what was found at a place to `.quarantine/`, with a note in JSON; another file there now is left."""
        place = self.folder / relative
        with guard(self.folder), _locked(self.folder / SCRATCH_FOLDER / LOCK_FILE):
            # Only holders of this lock remove a row, and publishing never replaces one: what is compared here
            # is what is moved.
            try:
                now = place.lstat()
            except FileNotFoundError:
                return
            if (now.st_dev, now.st_ino) != (found.st_dev, found.st_ino):
                return
            self._make_lasting(self.folder / QUARANTINE_FOLDER)
            self._count += 1
            kept = self.folder / QUARANTINE_FOLDER / f"{self.writer}-{self._count}-{place.name}.bad"
            place.rename(kept)
            kept.with_suffix(".json").write_bytes(orjson.dumps({**note, "path": str(relative)}) + b"\n")
            fsync_folder(kept.parent)
            fsync_folder(place.parent)

    def _make_lasting(self, folder: Path) -> None:
        if folder in self._lasting:
            return
        if folder != self.folder:
            self._make_lasting(folder.parent)
        else:
            folder.parent.mkdir(parents=True, exist_ok=True)
        folder.mkdir(exist_ok=True)
        # Also when another process made it: that one may not have come to this line yet. What lies above the
        # destination may be closed to us, and is not ours to make last.
        with suppress(PermissionError):
            fsync_folder(folder.parent)
        self._lasting.add(folder)


def _try_lock(path: Path) -> int | None:
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    return descriptor


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _sweep(scratch: Path) -> None:
    for folder in scratch.iterdir():
        if not folder.is_dir() or folder.is_symlink():
            continue
        try:
            lock = _try_lock(folder / LOCK_FILE)
        except PermissionError:
            continue  # another user's; that user's writers sweep it
        if lock is not None:
            shutil.rmtree(folder, ignore_errors=True)
            os.close(lock)

"""The dump folder as the engine sees it: prepared and swept at start, then small files and hidden ones."""

from __future__ import annotations

import fcntl
import os
import re
import stat
import time
import weakref
from contextlib import suppress
from pathlib import Path

from headrace.dumpfolder import read_card, read_problem
from headrace.dumps import ENGINE_FILE, FILE_MODE, FOLDER_MODE, LOST_SUFFIX, PROBLEM_FILE
from headrace.errors import Unreadable, UsageError

_OF_A_BOOT = (
    re.compile(r"\.([a-z0-9]{12})\..+"),
    re.compile(r"final_norm\.([a-z0-9]{12})\.safetensors"),
    re.compile(r"stats\.([a-z0-9]{12})\.json"),
)
_SHARED = {"/tmp", "/var/tmp", "/dev/shm"}
_NOTICE_AGE = 3600.0  # seconds after which no lease waits for an older boot's notice
_LITTER = 4096  # names of files that could not be removed; those of older ones the next boot sweeps


class Folder:
    """A dump folder, held open; every name is relative to it and no link is followed.

    Hidden names carry the boot id, `.{boot}.{rest}`. Each boot holds a lock on `.{boot}.lock` while its process
    lives, so a new boot sweeps what dead ones left and nothing of an engine beside it: the ranks of one server, or
    several servers, may share a folder.

    Raises:
        UsageError: the folder cannot be made, is not ours to use, or cannot be written.
    """

    def __init__(self, path: Path, boot: str) -> None:
        self.path = path
        self.boot = boot
        self._fd = self._lock = -1
        self._litter: dict[str, None] = {}
        try:
            path.mkdir(parents=True, exist_ok=True)
            self._fd, self._lock = self._open()
        except OSError as error:
            raise UsageError(
                f"dump folder {path}: {error.strerror}; HEADRACE_DUMP_DIR must be a folder that the engine can write"
            ) from error
        _open_folders.add(self)

    def hidden(self, rest: str) -> str:
        """The hidden name of this boot."""
        return f".{self.boot}.{rest}"

    def free_bytes(self) -> int:
        """Bytes that the folder's filesystem can still take."""
        status = os.fstatvfs(self._fd)
        return status.f_bavail * status.f_frsize

    def create(self, name: str) -> int:
        """Create a file for reading and writing and return its descriptor; FileExistsError when it is there."""
        return _create(self._fd, name)

    def publish(self, hidden: str, name: str) -> bool:
        """Give a finished hidden file its name, never replacing; False when the name was there already."""
        try:
            os.link(hidden, name, src_dir_fd=self._fd, dst_dir_fd=self._fd, follow_symlinks=False)
        except FileExistsError:
            return False
        finally:
            self.remove(hidden)
        return True

    def remove(self, name: str) -> None:
        """Remove a file if it is there; one that cannot be removed, as in a read-only folder, is left to `tidy`."""
        try:
            os.unlink(name, dir_fd=self._fd)
        except FileNotFoundError:
            pass
        except OSError:
            self._litter[name] = None
            while len(self._litter) > _LITTER:
                self._litter.pop(next(iter(self._litter), ""), None)

    def tidy(self) -> None:
        """Remove what could not be removed before, up to the first file that still cannot; by one thread at a time."""
        for name in list(self._litter):
            self._litter.pop(name, None)
            self.remove(name)
            if name in self._litter:  # behind the others now
                return

    def put(self, name: str, data: bytes, *, replace: bool) -> bool:
        """Publish a small file whole; without `replace` an existing one stays, and False is returned."""
        hidden = self.hidden(f"{name}.tmp")
        try:
            descriptor = self.create(hidden)
        except FileExistsError:  # one that failed, and could not be removed then
            self.remove(hidden)
            descriptor = self.create(hidden)
        try:
            try:
                write_all(descriptor, data, 0)
                os.fchmod(descriptor, FILE_MODE)
            finally:
                os.close(descriptor)
            if not replace:
                return self.publish(hidden, name)
            os.rename(hidden, name, src_dir_fd=self._fd, dst_dir_fd=self._fd)
        except BaseException:
            self.remove(hidden)
            raise
        return True

    def renew(self) -> bool:
        """Move to the folder that lies under the path now, if it is another one; True when it was.

        Threads may use the folder meanwhile: a file that was begun in the old one cannot be published in the new.

        Raises:
            OSError, UsageError: the other folder cannot be used; the old one is still held.
        """
        try:
            there = self.path.stat(follow_symlinks=False)
        except FileNotFoundError:
            return False
        if os.path.samestat(there, os.fstat(self._fd)):
            return False
        fd, lock = self._open()
        for new, old in ((fd, self._fd), (lock, self._lock)):  # whoever has a number keeps a valid one
            os.dup2(new, old, inheritable=False)
            os.close(new)
        return True

    def close(self) -> None:
        """Give the boot's lock up; what lies in the folder stays."""
        if self._lock >= 0:
            self.tidy()
            self.remove(self.hidden("lock"))  # where the folder cannot be written, the next boot sweeps it
        self.forget()

    def forget(self) -> None:
        """Close the descriptors; the lock stays with whoever else has them, as the parent of a forked process."""
        for descriptor in (self._lock, self._fd):
            if descriptor >= 0:
                os.close(descriptor)
        self._lock = self._fd = -1

    def _open(self) -> tuple[int, int]:
        fd = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        lock = -1
        try:
            self._set_mode(fd)
            # Whoever starts holds the folder: a lock file appears and is locked before another boot can judge it.
            fcntl.flock(fd, fcntl.LOCK_EX)
            try:
                lock = _create(fd, self.hidden("lock"))
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                self._sweep(fd)
            finally:
                fcntl.flock(fd, fcntl.LOCK_UN)
        except BaseException:
            if lock >= 0:
                with suppress(OSError):
                    os.unlink(self.hidden("lock"), dir_fd=fd)
                os.close(lock)
            os.close(fd)
            raise
        return fd, lock

    def _set_mode(self, fd: int) -> None:
        status = os.fstat(fd)
        # A fresh tmpfs mount is sticky too, but it is empty and stands in no place that everybody uses.
        if status.st_mode & stat.S_ISVTX and (os.path.realpath(self.path) in _SHARED or any(self.path.iterdir())):
            raise UsageError(
                f"dump folder {self.path} is a shared temporary folder; name a folder of its own inside it"
            )
        if stat.S_IMODE(status.st_mode) != FOLDER_MODE:
            try:
                os.fchmod(fd, FOLDER_MODE)
            except PermissionError:
                # A volume that belongs to another user (Kubernetes' emptyDir) is used as it was given.
                if not os.access(self.path, os.W_OK | os.X_OK):
                    raise

    def _sweep(self, fd: int) -> None:
        alive: dict[str, bool] = {self.boot: True}
        with os.scandir(fd) as entries:
            names = [entry.name for entry in entries]
        for name in names:
            boot = self._boot_of(name)
            if boot is not None:
                if boot not in alive:
                    alive[boot] = _alive(fd, boot)
                stale = not alive[boot]
            else:
                stale = name.endswith(LOST_SUFFIX) and _age(fd, name) > _NOTICE_AGE
            if stale:
                with suppress(FileNotFoundError):
                    os.unlink(name, dir_fd=fd)

    def _boot_of(self, name: str) -> str | None:
        """The boot that left a file; empty where the file does not say, None for what is no boot's."""
        if name in (ENGINE_FILE, PROBLEM_FILE):
            try:
                path = self.path / name
                return read_card(path).boot if name == ENGINE_FILE else read_problem(path).boot
            except (Unreadable, OSError):
                return ""
        for pattern in _OF_A_BOOT:
            if match := pattern.fullmatch(name):
                return match[1]
        return None


def write_all(descriptor: int, data: bytes | memoryview, offset: int) -> None:
    """Write all of `data` at `offset`."""
    view = memoryview(data)
    while view:
        written = os.pwrite(descriptor, view, offset)
        view = view[written:]
        offset += written


def _create(fd: int, name: str) -> int:
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    return os.open(name, flags, 0o600, dir_fd=fd)


def _alive(fd: int, boot: str) -> bool:
    try:
        descriptor = os.open(f".{boot}.lock", os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK, dir_fd=fd)
    except (OSError, ValueError):
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False


def _age(fd: int, name: str) -> float:
    try:
        return time.time() - os.stat(name, dir_fd=fd, follow_symlinks=False).st_mtime
    except FileNotFoundError:
        return 0.0


_open_folders: weakref.WeakSet[Folder] = weakref.WeakSet()


def _forget_all() -> None:
    for folder in list(_open_folders):
        folder.forget()


# A process forked off would keep the lock held after the engine is dead, and nobody would sweep what it left.
os.register_at_fork(after_in_child=_forget_all)

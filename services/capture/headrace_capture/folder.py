"""The dump folder as the engine sees it: prepared and swept at start, then small files and hidden ones."""

from __future__ import annotations

import fcntl
import os
import re
import stat
import time
from pathlib import Path

from headrace.dumpfolder import read_card
from headrace.dumps import ENGINE_FILE, FILE_MODE, FOLDER_MODE, LOST_SUFFIX
from headrace.errors import Unreadable, UsageError

_HIDDEN = re.compile(r"\.([a-z0-9]{12})\..+")
_NORM = re.compile(r"final_norm\.([a-z0-9]{12})\.safetensors")
_SHARED = {"/tmp", "/var/tmp", "/dev/shm"}
_NOTICE_AGE = 3600.0  # seconds after which no lease waits for an older boot's notice


class Folder:
    """A dump folder, held open; every name is relative to it and no link is followed.

    Hidden names carry the boot id, `.{boot}.{rest}`. Each boot holds a lock on `.{boot}.lock` while its process
    lives, so a new boot sweeps what dead ones left and nothing of an engine beside it.

    Raises:
        UsageError: the folder cannot be made, is not ours to use, or cannot be written.
    """

    def __init__(self, path: Path, boot: str) -> None:
        self.path = path
        self.boot = boot
        self._fd = self._lock = -1
        try:
            path.mkdir(parents=True, exist_ok=True)
            self._fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
            self._set_mode()
            # Whoever starts holds the folder: a lock file appears and is locked before another boot can judge it.
            fcntl.flock(self._fd, fcntl.LOCK_EX)
            try:
                self._lock = self.create(self.hidden("lock"))
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                self._sweep()
            finally:
                fcntl.flock(self._fd, fcntl.LOCK_UN)
        except OSError as error:
            self.close()
            raise UsageError(
                f"dump folder {path}: {error.strerror}; HEADRACE_DUMP_DIR must be a folder that the engine can write"
            ) from error
        except UsageError:
            self.close()
            raise

    def hidden(self, rest: str) -> str:
        """The hidden name of this boot."""
        return f".{self.boot}.{rest}"

    def free_bytes(self) -> int:
        """Bytes that the folder's filesystem can still take."""
        status = os.fstatvfs(self._fd)
        return status.f_bavail * status.f_frsize

    def create(self, name: str) -> int:
        """Create a file for reading and writing and return its descriptor; FileExistsError when it is there."""
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        return os.open(name, flags, 0o600, dir_fd=self._fd)

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
        """Remove a file if it is there."""
        try:
            os.unlink(name, dir_fd=self._fd)
        except FileNotFoundError:
            pass

    def put(self, name: str, data: bytes, *, replace: bool) -> bool:
        """Publish a small file whole; without `replace` an existing one stays, and False is returned."""
        hidden = self.hidden(f"{name}.tmp")
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
        except OSError:
            self.remove(hidden)
            raise
        return True

    def close(self) -> None:
        """Give the boot's lock up; what lies in the folder stays."""
        if self._lock >= 0:
            self.remove(self.hidden("lock"))
            os.close(self._lock)
            self._lock = -1
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _set_mode(self) -> None:
        status = os.fstat(self._fd)
        # A fresh tmpfs mount is sticky too, but it is empty and stands in no place that everybody uses.
        if status.st_mode & stat.S_ISVTX and (os.path.realpath(self.path) in _SHARED or any(self.path.iterdir())):
            raise UsageError(
                f"dump folder {self.path} is a shared temporary folder; name a folder of its own inside it"
            )
        if stat.S_IMODE(status.st_mode) != FOLDER_MODE:
            try:
                os.fchmod(self._fd, FOLDER_MODE)
            except PermissionError:
                # A volume that belongs to another user (Kubernetes' emptyDir) is used as it was given.
                if not os.access(self.path, os.W_OK | os.X_OK):
                    raise

    def _sweep(self) -> None:
        alive: dict[str, bool] = {self.boot: True}
        with os.scandir(self._fd) as entries:
            names = [entry.name for entry in entries]
        for name in names:
            match = _HIDDEN.fullmatch(name) or _NORM.fullmatch(name)
            if match is not None:
                boot = match.group(1)
                if boot not in alive:
                    alive[boot] = self._alive(boot)
                stale = not alive[boot]
            elif name == ENGINE_FILE:
                stale = not self._alive(self._card_boot())
            else:
                stale = name.endswith(LOST_SUFFIX) and self._age(name) > _NOTICE_AGE
            if stale:
                self.remove(name)

    def _alive(self, boot: str) -> bool:
        try:
            flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
            descriptor = os.open(f".{boot}.lock", flags, dir_fd=self._fd)
        except OSError:
            return False
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        finally:
            os.close(descriptor)
        return False

    def _card_boot(self) -> str:
        try:
            return read_card(self.path / ENGINE_FILE).boot
        except (Unreadable, OSError):
            return ""

    def _age(self, name: str) -> float:
        try:
            return time.time() - os.stat(name, dir_fd=self._fd, follow_symlinks=False).st_mtime
        except FileNotFoundError:
            return 0.0


def write_all(descriptor: int, data: bytes | memoryview, offset: int) -> None:
    """Write all of `data` at `offset`."""
    view = memoryview(data)
    while view:
        written = os.pwrite(descriptor, view, offset)
        view = view[written:]
        offset += written

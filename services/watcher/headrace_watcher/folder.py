"""The dump folder as its one watcher sees it: locked, named, scanned and measured."""

from __future__ import annotations

import fcntl
import os
import re
import secrets
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from headrace.dumpfolder import read_site
from headrace.dumps import (
    DUMP_SUFFIX,
    ENGINE_FILE,
    FILE_MODE,
    FOLDER_MODE,
    LOCK_FILE,
    LOST_SUFFIX,
    PROBLEM_FILE,
    SITE_FILE,
)
from headrace.errors import Conflict, InvalidId, Unreadable, UsageError
from headrace.ids import NONCE_ALPHABET, RequestId

_SITE = re.compile(r"s[a-z0-9]{10}")
_OF_A_BOOT = re.compile(r"final_norm\..+|stats\..+\.json")
Stamp = tuple[int, int, int]  # inode, time of change, size: another one is another file


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One of our files. `nbytes` is what it takes of the folder; `published` is when it appeared, by the wall clock."""

    name: str
    inode: int
    nbytes: int
    published: float
    request: RequestId


@dataclass(frozen=True, slots=True, kw_only=True)
class Listing:
    """What lies in the folder now.

    `card` changes whenever `engine.json` does, and `problem` whenever `engine.problem.json` does; `foreign` are visible
    names that are nobody's of ours; `sizes` are bytes by inode, hidden files included, each file once however many
    names it has.
    """

    dumps: tuple[Entry, ...]
    notices: tuple[Entry, ...]
    card: Stamp | None
    problem: Stamp | None
    foreign: tuple[str, ...]
    sizes: Mapping[int, int]

    @property
    def nbytes(self) -> int:
        """Bytes in the folder."""
        return sum(self.sizes.values())


def identify(name: str) -> tuple[RequestId, str] | None:
    """The request and the suffix of a file that is ours to judge; None for every other name."""
    for suffix in (DUMP_SUFFIX, LOST_SUFFIX):
        if name.endswith(suffix):
            try:
                return RequestId.parse(name.removesuffix(suffix)), suffix
            except InvalidId:
                return None
    return None


def is_known(name: str) -> bool:
    """Whether a file belongs to the plugin or to us without being a dump or a notice."""
    return name.startswith(".") or name in (ENGINE_FILE, PROBLEM_FILE) or _OF_A_BOOT.fullmatch(name) is not None


class DumpFolder:
    """A dump folder that this process alone watches; `site` names this life of the folder."""

    def __init__(self, path: Path, lock: int, site: str) -> None:
        """Made by `open`."""
        self.path = path
        self.site = site
        self._lock = lock

    @classmethod
    def open(cls, path: Path) -> DumpFolder:
        """Make the folder if it is missing, lock it, and give it a name if it has none.

        Raises:
            UsageError: it is no folder that can be written, or its filesystem has no links or renames.
            Conflict: another watcher serves it.
        """
        try:
            _make(path)
            lock = os.open(path / LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, FILE_MODE)
        except OSError as error:
            raise _unusable(path, error) from error
        try:
            _take(path, lock)
            try:
                _probe(path)
                site = _site(path)
            except OSError as error:
                raise _unusable(path, error) from error
        except BaseException:
            os.close(lock)
            raise
        return cls(path, lock, site)

    def __enter__(self) -> Self:
        """The folder is held until the block ends."""
        return self

    def __exit__(self, *_: object) -> None:
        """Let the next watcher in; the lock file stays, since a new one could be locked twice."""
        os.close(self._lock)

    def check(self) -> None:
        """Raise Conflict when the folder was removed or made anew behind us: it is another site then."""
        try:
            found = (self.path / LOCK_FILE).stat(follow_symlinks=False)
        except OSError as error:
            raise Conflict(f"dump folder {self.path} is gone ({error.strerror}); start the watcher again") from error
        if not os.path.samestat(found, os.fstat(self._lock)):
            raise Conflict(f"dump folder {self.path} was made anew; start the watcher again")

    def capacity(self) -> tuple[int, int]:
        """Bytes of the folder's filesystem: in all, and free for us."""
        status = os.statvfs(self.path)
        return status.f_blocks * status.f_frsize, status.f_bavail * status.f_frsize

    def scan(self) -> Listing:
        """List and measure the folder; raises Conflict when it is gone."""
        dumps: list[Entry] = []
        notices: list[Entry] = []
        foreign: list[str] = []
        sizes: dict[int, int] = {}
        stamps: dict[str, Stamp] = {}
        try:
            entries = os.scandir(self.path)
        except OSError as error:
            raise Conflict(f"dump folder {self.path} is gone ({error.strerror}); start the watcher again") from error
        with entries:
            for found in entries:
                try:
                    status = found.stat(follow_symlinks=False)
                except FileNotFoundError:
                    continue
                # A file on tmpfs may take less than it is long, when it has holes that will be filled.
                size = sizes[status.st_ino] = max(status.st_size, 512 * status.st_blocks)
                ours = identify(found.name)
                if ours is None or not found.is_file(follow_symlinks=False):
                    if not is_known(found.name):
                        foreign.append(found.name)
                    elif found.name in (ENGINE_FILE, PROBLEM_FILE):
                        stamps[found.name] = (status.st_ino, status.st_mtime_ns, status.st_size)
                    continue
                request, suffix = ours
                entry = Entry(
                    name=found.name, inode=status.st_ino, nbytes=size, published=status.st_ctime, request=request
                )
                (dumps if suffix == DUMP_SUFFIX else notices).append(entry)
        return Listing(
            dumps=tuple(dumps),
            notices=tuple(notices),
            card=stamps.get(ENGINE_FILE),
            problem=stamps.get(PROBLEM_FILE),
            foreign=tuple(foreign),
            sizes=sizes,
        )


def _make(path: Path) -> None:
    try:
        path.mkdir(parents=True)
    except FileExistsError:
        return
    path.chmod(FOLDER_MODE)  # mkdir's mode is cut by the umask and takes no setgid bit


def _take(path: Path, lock: int) -> None:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        holder = os.pread(lock, 20, 0).decode("ascii", "replace").strip()
        who = f"process {holder}" if holder.isdigit() else "another process"
        raise Conflict(f"dump folder {path} is watched by {who} already; stop it, or name another folder") from None
    os.ftruncate(lock, 0)
    os.pwrite(lock, f"{os.getpid()}\n".encode(), 0)


def _probe(path: Path) -> None:
    """What publishes whole needs: a link and a rename inside the folder."""
    first, second, third = (path / f".probe-{secrets.token_hex(6)}" for _ in range(3))
    try:
        first.touch(mode=FILE_MODE)
        second.hardlink_to(first)
        second.rename(third)
    finally:
        for probe in (first, second, third):
            with suppress(OSError):
                probe.unlink(missing_ok=True)


def _site(path: Path) -> str:
    try:
        known = read_site(path)
    except Unreadable as error:
        raise UsageError(f"{path / SITE_FILE}: {error}; remove it") from error
    if known is not None and _SITE.fullmatch(known):
        return known
    site = "s" + "".join(secrets.choice(NONCE_ALPHABET) for _ in range(10))
    temporary = path / f".site-{secrets.token_hex(6)}"
    try:
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, FILE_MODE)
        with os.fdopen(descriptor, "w") as file:
            file.write(f"{site}\n")
            file.flush()
            os.fsync(file.fileno())
        temporary.rename(path / SITE_FILE)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
    return site


def _unusable(path: Path, error: OSError) -> UsageError:
    return UsageError(
        f"dump folder {path}: {error.strerror}; HEADRACE_DUMP_DIR must be a folder that this user can write, "
        "on a filesystem with hard links (a tmpfs, or a local disk)"
    )

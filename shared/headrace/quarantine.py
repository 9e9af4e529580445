"""Refused dumps, kept on a disk with their verdicts, oldest out first; never on the tmpfs that dumps fill."""

from __future__ import annotations

import json
import os
import secrets
import shutil
import time
from dataclasses import dataclass
from pathlib import Path

from headrace import logs
from headrace.dumpfolder import open_nofollow
from headrace.errors import Unreadable
from headrace.ids import RequestId
from headrace.verdicts import Refusal

log = logs.get(__name__)

DUMP_NAME = "dump.safetensors"
VERDICT_NAME = "verdict.json"
_HEAD_BYTES = 1 << 20  # of a dump that is larger than the whole quarantine may be
_LEAST_BYTES = 4096  # that an entry counts for, however small its dump: its folder and its verdict take room too
_TEMPORARY = ".new-"
_STALE_SECONDS = 3600  # after which a temporary folder is that of a process that died


@dataclass(frozen=True, slots=True)
class Quarantine:
    """`{folder}/{request}/` holds a refused dump and why. Several processes share it.

    At most `most_bytes` of dumps are kept, each counted as 4 KiB at least, and the latest one in any case; 0 keeps
    nothing.
    """

    folder: Path
    most_bytes: int

    def take(self, path: Path, request: RequestId, refusal: Refusal, site: str) -> None:
        """Move a dump here, with its verdict, and remove it from the dump folder.

        A quarantine of 0 bytes, without room or without permission keeps nothing: the dump is removed all the same,
        and the verdict is in the log, since a refused dump must not fill the folder that the engine writes to.
        """
        verdict = {
            "request": str(request),
            "site": site,
            "reason": refusal.reason,
            "detail": refusal.detail,
            "at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        }
        try:
            if self.most_bytes:
                self._keep(path, str(request), verdict)
        except (OSError, Unreadable) as error:
            log.warning("refused dump not kept", quarantine=str(self.folder), error=str(error), **verdict)
        path.unlink(missing_ok=True)

    def _keep(self, path: Path, name: str, verdict: dict[str, str]) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        temporary = self.folder / f"{_TEMPORARY}{name}-{secrets.token_hex(4)}"
        temporary.mkdir()
        try:
            with open_nofollow(path) as source, (temporary / DUMP_NAME).open("xb") as target:
                size = os.fstat(source.fileno()).st_size
                most = size if size <= self.most_bytes else min(_HEAD_BYTES, self.most_bytes)
                self._make_room(most)
                _copy(source.fileno(), target.fileno(), most)
            (temporary / VERDICT_NAME).write_text(json.dumps(verdict, indent=2) + "\n")
            temporary.rename(self.folder / name)
        except FileNotFoundError:
            shutil.rmtree(temporary, ignore_errors=True)  # the dump is gone: nothing to keep
        except (OSError, Unreadable):
            shutil.rmtree(temporary, ignore_errors=True)
            if not (self.folder / name).is_dir():  # else it is here already, from before a crash
                raise

    def _make_room(self, size: int) -> None:
        kept = []
        for entry in sorted(self.folder.iterdir(), key=_age):
            if not entry.name.startswith(_TEMPORARY):
                kept.append(entry)
            elif time.time() - _age(entry) > _STALE_SECONDS:
                shutil.rmtree(entry, ignore_errors=True)
        used = sum(_cost(entry) for entry in kept) + max(size, _LEAST_BYTES)
        for entry in kept:
            if used <= self.most_bytes:
                return
            used -= _cost(entry)
            shutil.rmtree(entry, ignore_errors=True)


def _copy(source: int, target: int, most: int) -> None:
    position = 0
    while position < most:
        sent = os.sendfile(target, source, position, min(most - position, 8 << 20))
        if sent == 0:
            return
        position += sent


def _age(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except FileNotFoundError:
        return 0.0


def _cost(entry: Path) -> int:
    try:
        return max((entry / DUMP_NAME).stat().st_size, _LEAST_BYTES)
    except FileNotFoundError:
        return _LEAST_BYTES if entry.exists() else 0  # another process may have removed it meanwhile

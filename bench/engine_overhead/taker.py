"""Stands in for the watcher and the writer, in a process of its own: checks and removes dumps as they appear."""

from __future__ import annotations

import multiprocessing
import os
import time
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from types import TracebackType

import xxhash

from headrace.dumpfolder import open_nofollow, read_card, read_dump, read_lost
from headrace.dumps import CHECKSUM_PREFIX, DUMP_SUFFIX, ENGINE_FILE, LOST_SUFFIX, Dump, EngineCard
from headrace.errors import Unreadable
from headrace.ids import RequestId
from headrace.verdicts import Refusal, Requirement, judge

_PAUSE = 0.005  # seconds between looks
_BLOCK = 4 << 20
_KEPT = 5  # descriptions of what was wrong


@dataclass(slots=True, kw_only=True)
class Taken:
    """What one run's requests left in the folder.

    `nbytes` are the states alone, token ids and headers not counted; `checksums` were computed and equal;
    `wrong` counts dumps that are not what they claim, of which `examples` tell; `lost` is by the notices' reason;
    `last` is when the last one was seen (monotonic seconds).
    """

    published: int = 0
    nbytes: int = 0
    checksums: int = 0
    wrong: int = 0
    lost: dict[str, int] = field(default_factory=dict)
    examples: list[str] = field(default_factory=list)
    last: float = 0.0

    @property
    def settled(self) -> int:
        """Requests that were published or lost."""
        return self.published + sum(self.lost.values())


class Taker:
    """The process, from `with` to the block's end; every `every`th dump's checksum is computed, too."""

    def __init__(self, folder: Path, every: int) -> None:
        context = multiprocessing.get_context("spawn")
        self._ours, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(folder, every, theirs), daemon=True)

    def __enter__(self) -> Taker:
        self._process.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ours.close()
        self._process.join(10)
        self._process.kill()

    def taken(self, run: str) -> Taken:
        """What a run's requests have left so far."""
        self._ours.send(run)
        answer = self._ours.recv()
        assert isinstance(answer, Taken)
        return answer

    def wait(self, run: str, count: int, seconds: float) -> Taken:
        """The same once `count` requests are settled, or after so many seconds."""
        deadline = time.monotonic() + seconds
        while (taken := self.taken(run)).settled < count and time.monotonic() < deadline:
            time.sleep(0.02)
        return taken


def check(path: Path, card: EngineCard, *, checksum: bool) -> int:
    """Judge a dump as the watcher does, by its name and the engine's card, and compute its checksum if asked to.

    Returns:
        The bytes of its states.

    Raises:
        Unreadable: it is not what it claims.
    """
    request = RequestId.parse(path.name.removesuffix(DUMP_SUFFIX))
    dump = read_dump(path)
    requirement = Requirement(
        boundaries=card.boundaries, final_state=card.final_state, hidden_size=card.hidden_size, identity=None
    )
    verdict = judge(dump, request, requirement)
    if isinstance(verdict, Refusal):
        raise Unreadable(f"{request}: {verdict.reason}: {verdict.detail}")
    if checksum and _checksum(path, dump) != dump.header.checksum:
        raise Unreadable(f"{request}: damaged")
    return dump.header.tensors["aux"].nbytes + dump.header.tensors["final"].nbytes


def _checksum(path: Path, dump: Dump) -> str:
    digest = xxhash.xxh3_64()
    with open_nofollow(path) as file:
        file.seek(dump.data_offset)
        while block := file.read(_BLOCK):
            digest.update(block)
    return CHECKSUM_PREFIX + digest.hexdigest()


def _serve(folder: Path, every: int, asked: Connection) -> None:
    runs: dict[str, Taken] = {}
    seen = 0
    while True:
        found = _names(folder)
        if found:
            card = read_card(folder / ENGINE_FILE)  # there before the first dump
            for name in found:
                seen += 1
                _take(folder / name, card, runs, checksum=seen % every == 0)
        try:
            while asked.poll(0 if found else _PAUSE):
                asked.send(runs.get(asked.recv(), Taken()))
        except (EOFError, BrokenPipeError):  # the other end is done, or gone
            return


def _names(folder: Path) -> list[str]:
    try:
        with os.scandir(folder) as entries:
            return [entry.name for entry in entries if entry.name.startswith("hr-")]
    except FileNotFoundError:  # the engine has not started yet
        return []


def _take(path: Path, card: EngineCard, runs: dict[str, Taken], *, checksum: bool) -> None:
    request = RequestId.parse(path.name.removesuffix(LOST_SUFFIX).removesuffix(DUMP_SUFFIX))
    taken = runs.setdefault(request.run, Taken())
    taken.last = time.monotonic()
    try:
        if path.name.endswith(LOST_SUFFIX):
            reason = read_lost(path).reason
            taken.lost[reason] = taken.lost.get(reason, 0) + 1
        else:
            taken.published += 1
            taken.nbytes += check(path, card, checksum=checksum)
            taken.checksums += checksum
    except Unreadable as error:
        taken.wrong += 1
        taken.examples = [*taken.examples, str(error)][:_KEPT]
    finally:
        path.unlink(missing_ok=True)

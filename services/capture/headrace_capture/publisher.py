"""What the writer threads do with a request: fill its file, publish it or leave a notice, and keep the books."""

from __future__ import annotations

import errno
import logging
import threading
import time
import traceback
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from headrace.dumps import LOST_SUFFIX, Lost, encode_json
from headrace.reasons import Reason
from headrace_capture.assembly import Loss, Place
from headrace_capture.batching import Batch, Cut
from headrace_capture.dumpfile import DumpFile, EngineFacts
from headrace_capture.folder import Folder
from headrace_capture.ring import Ring, Slot
from headrace_capture.room import Room
from headrace_capture.rows import Rows, RowShape
from headrace_capture.stats import Accumulator
from headrace_capture.writer import Writer

logger = logging.getLogger("headrace.capture")

_NO_ROOM = {errno.ENOSPC, errno.EDQUOT}
_WAITING_NOTICES = 10_000  # for each writer; beyond them a loss is only counted
_KEPT_NOTICES = 4096  # notices that nobody took away make room for newer ones
_MEASURE_EVERY = 0.05  # seconds; a filesystem that fills is noticed before the timer looks


@dataclass(frozen=True, slots=True, kw_only=True)
class Counts:
    """What became of requests since the boot.

    `lost` is by reason; `ignored` counts pieces that nobody captures (other ids, decode rows, late parts);
    `published_bytes` are whole files; `half_assembled` requests wait for more rows; `buffer_bytes` are in use now.
    """

    published: int
    published_bytes: int
    lost: Mapping[str, int]
    ignored: int
    half_assembled: int
    buffer_bytes: int


@dataclass(slots=True, kw_only=True, eq=False)
class _Dump:
    """A request that is being written.

    `started` once a write was queued; `settled` once it is published or lost, which happens once.
    """

    request: str
    file: DumpFile
    stats: Accumulator
    writer: Writer
    started: bool = False
    settled: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Filled:
    """A batch in a slot of the ring; on a GPU the rows are there when `arrived` has happened."""

    batch: Batch
    slot: Slot
    rows: Rows
    arrived: torch.cuda.Event | None


class Publisher:
    """The requests between their first row and their end.

    Each request belongs to one writer thread, so its file needs no lock and its jobs stay in order. `lock` guards
    the books, here and in the assembly whose `conclude` is called under it. The scheduler's thread takes it, so
    nobody holds it for longer than a few statements: never while a file is written, a filesystem asked, a line
    logged or a slot waited for. `enter_thread` is called in each writer thread before its first job.
    """

    def __init__(
        self,
        folder: Folder,
        room: Room,
        facts: EngineFacts,
        shape: RowShape,
        ring: Ring,
        *,
        writers: int,
        conclude: Callable[[str], None],
        enter_thread: Callable[[], None],
    ) -> None:
        self.lock = threading.RLock()
        self._folder = folder
        self._room = room
        self._facts = facts
        self._shape = shape
        self._ring = ring
        self._conclude = conclude
        self._dumps: dict[str, _Dump] = {}
        self._notices: deque[str] = deque()
        self._lost: Counter[str] = Counter()
        self._published = 0
        self._published_bytes = 0
        self._unsaid: Counter[str] = Counter()
        self._last = self._trace = ""
        self._writers: list[Writer] = []
        try:
            for number in range(writers):
                self._writers.append(Writer(f"headrace-capture-{number}", enter_thread))
        except RuntimeError:  # no more threads can be had
            self.end()
            raise

    def counts(self, *, ignored: int, half_assembled: int) -> Counts:
        """The books, with what the caller counts."""
        with self.lock:
            return Counts(
                published=self._published,
                published_bytes=self._published_bytes,
                lost=dict(self._lost),
                ignored=ignored,
                half_assembled=half_assembled,
                buffer_bytes=self._ring.in_use,
            )

    def open(self, places: Sequence[Place], weight_version: str) -> list[Loss]:
        """Open the requests whose first rows came, but not those that the folder has no room for."""
        firsts = [place for place in places if place.first]
        return [loss for place in firsts if (loss := self._open(place, weight_version)) is not None]

    def is_open(self, request: str) -> bool:
        """Whether the request is neither published nor lost."""
        return request in self._dumps

    def write(self, cuts: Sequence[Cut], filled: Filled) -> None:
        """Queue cuts of a filled slot, each of which gives up its share of the slot when written."""
        for cut in cuts:
            with self.lock:
                dump = self._dumps.get(cut.place.request)
                if dump is not None:
                    dump.started = True
            if dump is None:
                self._ring.release(filled.slot)
            else:
                dump.writer.put(partial(self._write, dump, cut, filled), cut.rows * self._shape.row_bytes)

    def lose(self, loss: Loss) -> None:
        """Conclude a request as lost: its file is removed and a notice left, by its writer thread."""
        with self.lock:
            self._conclude(loss.request)
            dump = self._dumps.pop(loss.request, None)
            if dump is not None:
                dump.settled = True
            self._count_loss(loss, dump)

    def fail(self, loss: Loss) -> bool:
        """Conclude a request as lost if it is open here; False when it is published or lost already."""
        with self.lock:
            if loss.request not in self._dumps:
                return False
            self.lose(loss)
            return True

    def report(self) -> None:
        """Log what was lost since the last report, in one line however much it was."""
        with self.lock:
            unsaid, last, trace = self._unsaid, self._last, self._trace
            self._unsaid, self._trace = Counter(), ""
        if unsaid:
            counted = ", ".join(f"{reason} {count}" for reason, count in sorted(unsaid.items()))
            logger.warning("requests were lost (%s), the last one: %s%s", counted, last, trace and f"\n{trace}")

    def flush(self, deadline: float) -> bool:
        """Wait until the writers have nothing to do, or until `deadline`."""
        return all(writer.wait_idle(deadline) for writer in self._writers)

    def end(self) -> None:
        """End the writer threads after what is queued."""
        for writer in self._writers:
            writer.end()

    def join(self, deadline: float) -> bool:
        """Wait for the end of the writer threads; False when one did not end by `deadline`."""
        return all(writer.join(deadline) for writer in self._writers)

    def _open(self, place: Place, weight_version: str) -> Loss | None:
        request = place.request
        try:
            if problem := self._room.problem:
                return Loss(request=request, reason=Reason.INTERNAL, detail=problem)
            file = DumpFile(self._folder, self._room, self._facts, request, place.tokens, weight_version)
            dump = _Dump(request=request, file=file, stats=Accumulator(self._shape), writer=self._least_loaded())
            if refusal := self._room.promise(file.size):
                return Loss(request=request, reason=Reason.NO_ROOM, detail=refusal)
        except Exception as error:  # noqa: BLE001 - nobody else knows of the request, and it has to have an end
            return Loss(request=request, reason=Reason.INTERNAL, detail=f"opening the dump: {error!r}")
        with self.lock:
            self._dumps[request] = dump
        return None

    def _least_loaded(self) -> Writer:
        return min(self._writers, key=lambda writer: writer.load)

    def _count_loss(self, loss: Loss, dump: _Dump | None) -> None:
        self._lost[loss.reason.value] += 1
        self._unsaid[loss.reason.value] += 1
        self._last = f"{loss.request}: {loss.detail}"
        writer = self._least_loaded() if dump is None else dump.writer
        if writer.waiting < _WAITING_NOTICES or (dump is not None and dump.started):
            writer.put(partial(self._give_up, dump, loss))
        elif dump is not None:
            dump.file.discard()  # nothing is written yet, only promised

    def _write(self, dump: _Dump, cut: Cut, filled: Filled) -> None:
        try:
            if dump.settled:
                return
            if filled.arrived is not None:
                filled.arrived.synchronize()
            begin = cut.source - filled.batch.begin
            end = begin + cut.rows
            sections = filled.rows.sections(self._ring.memory, begin, end)
            dump.stats.add(filled.rows, begin, end)
            if not cut.completes:
                dump.file.write(cut.at, cut.rows, sections)
                return
            place, stats = cut.place, dump.stats.stats(self._facts.boundaries)
            if cut.rows == place.tokens:
                dump.file.write_whole(sections, parts=place.parts, retractions=place.retractions, stats=stats)
            else:
                dump.file.write(cut.at, cut.rows, sections)
                dump.file.seal(parts=place.parts, retractions=place.retractions, stats=stats)
            self._publish(dump)
        except OSError as error:
            reason = Reason.NO_ROOM if error.errno in _NO_ROOM else Reason.INTERNAL
            self.fail(Loss(request=dump.request, reason=reason, detail=f"writing the dump: {error}"))
        except BaseException as error:  # noqa: BLE001 - whatever it is costs this request, and nothing else
            self._trace = traceback.format_exc()
            detail = f"writing the dump: {type(error).__name__}: {error}"
            self.fail(Loss(request=dump.request, reason=Reason.INTERNAL, detail=detail))
        finally:
            self._ring.release(filled.slot)

    def _publish(self, dump: _Dump) -> None:
        with self.lock:
            if dump.settled:
                return
            dump.settled = True
            del self._dumps[dump.request]
        try:
            fresh = dump.file.publish()
        except BaseException as error:  # noqa: BLE001 - it is in no book any more: nobody else would count it
            with self.lock:
                detail = f"publishing the dump: {error}"
                self._count_loss(Loss(request=dump.request, reason=Reason.INTERNAL, detail=detail), dump)
            return
        if not fresh:
            logger.info("%s was published already", dump.request)
            return
        with self.lock:
            self._published += 1
            self._published_bytes += dump.file.size
        self._room.measure(time.monotonic(), every=_MEASURE_EVERY)

    def _give_up(self, dump: _Dump | None, loss: Loss) -> None:
        notice = Lost(request=loss.request, reason=loss.reason.value, detail=loss.detail, boot=self._folder.boot)
        name = loss.request + LOST_SUFFIX
        try:
            if dump is not None:
                dump.file.discard()
            if self._folder.put(name, encode_json(notice), replace=False):
                self._keep_notice(name)
        except BaseException as error:  # noqa: BLE001 - the loss is counted, and told with the others
            self._last = f"{loss.request}: {loss.detail}; no notice can be left: {error}"
        self._room.measure(time.monotonic(), every=_MEASURE_EVERY)

    def _keep_notice(self, name: str) -> None:
        with self.lock:
            self._notices.append(name)
            oldest = self._notices.popleft() if len(self._notices) > _KEPT_NOTICES else None
        if oldest is not None:
            self._folder.remove(oldest)

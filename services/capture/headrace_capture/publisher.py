"""What the writer threads do with a request: fill its file, publish it or leave a notice, and keep the books."""

from __future__ import annotations

import errno
import logging
import threading
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
from headrace_capture.rows import RowShape, Views
from headrace_capture.stats import Accumulator
from headrace_capture.writer import Writer

logger = logging.getLogger("headrace.capture")

_NO_ROOM = {errno.ENOSPC, errno.EDQUOT}
_WAITING_NOTICES = 10_000  # for each writer; beyond them a loss is only counted
_KEPT_NOTICES = 4096  # notices that nobody took away make room for newer ones


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


@dataclass(slots=True, kw_only=True)
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
    """A batch in a slot; on a GPU the slot is full when `arrived` has happened."""

    batch: Batch
    slot: Slot
    views: Views
    arrived: torch.cuda.Event | None


class Publisher:
    """The requests between their first row and their end.

    Each request belongs to one writer thread, so its file needs no lock and its jobs stay in order. `lock` guards
    the books, here and in the assembly whose `conclude` is called under it; nobody holds it while a file is written
    or a slot waited for.
    """

    def __init__(
        self,
        folder: Folder,
        facts: EngineFacts,
        shape: RowShape,
        ring: Ring,
        *,
        writers: int,
        conclude: Callable[[str], None],
    ) -> None:
        self.lock = threading.RLock()
        self._folder = folder
        self._facts = facts
        self._shape = shape
        self._ring = ring
        self._conclude = conclude
        self._writers = [Writer(f"headrace-capture-{number}") for number in range(writers)]
        self._dumps: dict[str, _Dump] = {}
        self._notices: deque[str] = deque()
        self._lost: Counter[str] = Counter()
        self._published = 0
        self._published_bytes = 0

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
        """Open the requests whose first rows came, but not those that the folder has no room for.

        Room is what the filesystem has, less what open requests were promised and have not taken.
        """
        losses: list[Loss] = []
        with self.lock:
            try:
                free = self._folder.free_bytes()
            except OSError as error:
                detail = f"the dump folder: {error}"
                return [Loss(request=p.request, reason=Reason.INTERNAL, detail=detail) for p in places if p.first]
            promised = sum(dump.file.unreserved for dump in self._dumps.values())
            for place in places:
                if not place.first:
                    continue
                file = DumpFile(self._folder, self._facts, place.request, place.tokens, weight_version)
                if file.size > free - promised:
                    detail = f"the dump needs {file.size} bytes, the folder has {free} and {promised} are promised"
                    losses.append(Loss(request=place.request, reason=Reason.NO_ROOM, detail=detail))
                    continue
                promised += file.size
                self._dumps[place.request] = _Dump(
                    request=place.request, file=file, stats=Accumulator(self._shape), writer=self._least_loaded()
                )
        return losses

    def is_open(self, request: str) -> bool:
        """Whether the request is neither published nor lost."""
        return request in self._dumps

    def write(self, cut: Cut, filled: Filled) -> None:
        """Queue a cut of a filled slot, of which it gives up its share when written."""
        with self.lock:
            dump = self._dumps.get(cut.place.request)
            if dump is not None:
                dump.started = True
        if dump is None:
            self._release(filled)
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

    def flush(self, deadline: float) -> bool:
        """Wait until the writers have nothing to do, or until `deadline`."""
        return all(writer.wait_idle(deadline) for writer in self._writers)

    def stop(self, deadline: float) -> bool:
        """End the writer threads after what is queued; False when one did not end in time."""
        ended = [writer.stop(deadline) for writer in self._writers]
        return all(ended)

    def _least_loaded(self) -> Writer:
        return min(self._writers, key=lambda writer: writer.load)

    def _count_loss(self, loss: Loss, dump: _Dump | None) -> None:
        self._lost[loss.reason.value] += 1
        writer = self._least_loaded() if dump is None else dump.writer
        if writer.waiting < _WAITING_NOTICES or (dump is not None and dump.started):
            writer.put(partial(self._give_up, dump, loss))

    def _write(self, dump: _Dump, cut: Cut, filled: Filled) -> None:
        try:
            if filled.arrived is not None:
                filled.arrived.synchronize()
            if dump.settled:
                return
            begin = cut.source - filled.batch.begin
            dump.file.write(cut.at, cut.rows, self._sections(filled, begin, begin + cut.rows))
            dump.stats.add(filled.views, begin, begin + cut.rows)
            if cut.completes:
                self._publish(dump, cut.place)
        except OSError as error:
            reason = Reason.NO_ROOM if error.errno in _NO_ROOM else Reason.INTERNAL
            self.fail(Loss(request=dump.request, reason=reason, detail=f"writing the dump: {error}"))
        except Exception as error:  # whatever it is costs this request, not the thread and not the engine
            logger.exception("writing the dump of %s", dump.request)
            detail = f"writing the dump: {type(error).__name__}: {error}"
            self.fail(Loss(request=dump.request, reason=Reason.INTERNAL, detail=detail))
        finally:
            self._ring.release(filled.slot)

    def _publish(self, dump: _Dump, place: Place) -> None:
        stats = dump.stats.stats(self._facts.boundaries)
        dump.file.seal(parts=place.parts, retractions=place.retractions, stats=stats)
        with self.lock:
            if dump.settled:
                return
            dump.settled = True
            del self._dumps[dump.request]
        try:
            fresh = dump.file.publish()
        except OSError as error:
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

    def _give_up(self, dump: _Dump | None, loss: Loss) -> None:
        logger.warning("%s is lost (%s): %s", loss.request, loss.reason, loss.detail)
        try:
            if dump is not None:
                dump.file.discard()
            notice = Lost(request=loss.request, reason=loss.reason.value, detail=loss.detail, boot=self._folder.boot)
            name = loss.request + LOST_SUFFIX
            if self._folder.put(name, encode_json(notice), replace=False):
                self._keep_notice(name)
        except OSError as error:
            logger.warning("no notice can be left of %s: %s", loss.request, error)

    def _keep_notice(self, name: str) -> None:
        with self.lock:
            self._notices.append(name)
            oldest = self._notices.popleft() if len(self._notices) > _KEPT_NOTICES else None
        if oldest is not None:
            self._folder.remove(oldest)

    def _release(self, filled: Filled) -> None:
        if filled.arrived is None:
            self._ring.release(filled.slot)
        else:  # the copy is still under way, and only a writer may wait for it
            self._least_loaded().put(partial(self._release_when_arrived, filled, filled.arrived))

    def _release_when_arrived(self, filled: Filled, arrived: torch.cuda.Event) -> None:
        try:
            arrived.synchronize()
        finally:
            self._ring.release(filled.slot)

    def _sections(self, filled: Filled, begin: int, end: int) -> tuple[memoryview, memoryview, memoryview]:
        rows = filled.batch.rows
        ids, _norms, aux, final = (
            filled.slot.memory[low + (high - low) // rows * begin : low + (high - low) // rows * end]
            for low, high in self._shape.spans(rows)
        )
        return ids, aux, final

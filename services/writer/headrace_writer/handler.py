"""What one storage job does: row, line, then `stored` in Redis, then the dump goes."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path

from structlog.contextvars import bound_contextvars

from headrace import logs, metrics
from headrace.bus import Bus
from headrace.bus.values import DESTINATION_FULL
from headrace.dumps import DUMP_SUFFIX
from headrace.errors import Conflict, HeadraceError, Unavailable, Unreadable, UsageError
from headrace.ids import RequestId
from headrace.manifest import read_submitted
from headrace.messages import Job, RecordJob, StoreJob
from headrace.quarantine import Quarantine
from headrace.runs import RunSpec
from headrace.settings import Settings
from headrace.verdicts import LOSSES, Reason, Refusal
from headrace_writer.destination import DestinationFull, guard
from headrace_writer.manifest import ManifestIndex
from headrace_writer.store import DumpGone, Refused, Store, Stored, finish

log = logs.get(__name__)

_OPEN_RUNS = 8
# How often a sample's jobs may raise what is neither a folder's nor Redis's fault before its attempt ends. The job's k
# will not do: it also counts jobs of a destination that was full for hours, and of writers that were killed.
_MOST_RAISED = 10
_MOST_REMEMBERED = 1000


class Handler:
    """Runs jobs of one site. Any job may come twice, or after its sample is done."""

    def __init__(self, bus: Bus, site: str, dump_dir: Path, writer: str, settings: Settings) -> None:
        """`writer` names this life of the process."""
        self._bus = bus
        self._site = site
        self._dump_dir = dump_dir
        self._writer = writer
        self._quarantine = Quarantine(settings.quarantine_dir, settings.quarantine_bytes)
        self._stores: OrderedDict[str, tuple[RunSpec, tuple[int, int], Store]] = OrderedDict()
        self._indexes: OrderedDict[str, tuple[RunSpec, ManifestIndex]] = OrderedDict()
        self._raised: OrderedDict[str, int] = OrderedDict()

    def __call__(self, job: Job) -> None:
        """Run one job; raises what RQ shall show as a failed job. The storing lease brings the job again."""
        if isinstance(job, StoreJob):
            with bound_contextvars(request=job.request):
                self._store_job(job)
        else:
            self._record_job(job)

    def close(self) -> None:
        """Close the datasets."""
        for run in list(self._stores):
            self._close(run)

    def _store_job(self, job: StoreJob) -> None:
        request = job.id
        answer = self._bus.requests.begin_store(request, job.job, self._site)
        path = self._dump_dir / f"{job.request}{DUMP_SUFFIX}"
        if answer == "done":
            finish(path)
        if answer != "go":
            return
        spec = self._bus.runs.spec(request.run)
        if spec is None:
            log.warning("no such run", run=request.run)
            return
        began = time.monotonic()
        try:
            with self._minding(request.run), self._renewing(request, job.job):
                outcome = self._store(spec).store(job, path, datetime.now(UTC))
        except HeadraceError:
            raise
        except Exception as error:  # a job that raises the same whenever it comes must have an end
            if not self._raised_too_often(request):
                raise
            log.exception("storage raised again and again")
            detail = f"storage raised {_MOST_RAISED} times, the last time {type(error).__name__}: {error}"
            self._give_up(request, path, Refusal(reason=Reason.INTERNAL, detail=detail))
            return
        self._raised.pop(job.request, None)
        if isinstance(outcome, Stored):
            new = self._bus.requests.stored(request, self._site, outcome.line.bytes) == "stored"
            finish(path)
            if new:
                _count(request, outcome.line.bytes, time.monotonic() - began)
            log.info("stored", ordinal=request.ordinal, adopted=outcome.adopted, already=outcome.already)
        elif isinstance(outcome, Refused):
            self._give_up(request, path, outcome.refusal)
        else:
            assert isinstance(outcome, DumpGone)
            log.warning("the dump is gone; its captured lease will lapse")

    def _give_up(self, request: RequestId, path: Path, refusal: Refusal) -> None:
        """The dump leaves the folder before the attempt ends, or the watcher would capture it again."""
        lost = refusal.reason in LOSSES
        self._quarantine.take(path, request, refusal, self._site)
        self._bus.requests.end(request, burn=True, kind="loss" if lost else "mismatch", reason=refusal.reason)
        metrics.see_run(request.run)
        if lost:
            metrics.LOSSES_TOTAL.labels(refusal.reason).inc()
        else:
            metrics.MATCH_FAILURES.labels(request.run, refusal.reason).inc()
        log.warning("refused by the writer", reason=refusal.reason, detail=refusal.detail)

    def _raised_too_often(self, request: RequestId) -> bool:
        """Count one job that raised; only the requests that raised last are remembered."""
        name = str(request)
        count = self._raised.pop(name, 0) + 1
        if count >= _MOST_RAISED:
            return True
        self._raised[name] = count
        if len(self._raised) > _MOST_REMEMBERED:
            self._raised.popitem(last=False)
        return False

    def _record_job(self, job: RecordJob) -> None:
        spec = self._bus.runs.spec(job.run)
        if spec is None:
            log.warning("no such run", run=job.run)
            return
        with self._minding(job.run):
            lines = self._store(spec).record(job.records, datetime.now(UTC))
        self._bus.runs.mark_done(job.run, lines)
        log.info("recorded", run=job.run, lines=len(lines))

    def _store(self, spec: RunSpec) -> Store:
        """The run's open dataset; the least recently used one is closed when there are many.

        Raises:
            Conflict: the run's inputs are not in its folder, which a writer never makes: it was removed, or is not
                mounted here.
        """
        with guard(Path(spec.output)):
            submitted = read_submitted(Path(spec.output))
        if submitted is None or submitted.digest != spec.digest:
            raise Conflict(
                f"{spec.output} does not hold the inputs of run {spec.run}: mount or restore the folder, then resume"
            )
        place = _place(Path(spec.output))
        known = self._stores.get(spec.run)
        if known is not None and known[:2] != (spec, place):
            self._close(spec.run)
            known = None
        if known is None:
            metrics.see_run(spec.run)
            index = self._index(spec)
            known = self._stores[spec.run] = (spec, place, Store(Path(spec.output), spec, self._writer, index))
            if len(self._stores) > _OPEN_RUNS:
                self._close(next(iter(self._stores)))
        self._stores.move_to_end(spec.run)
        return known[2]

    def _close(self, run: str) -> None:
        self._stores.pop(run)[2].close()

    def _index(self, spec: RunSpec) -> ManifestIndex:
        """What is known of the run's manifest; it outlives a store that is closed because its folder is away."""
        known = self._indexes.get(spec.run)
        if known is None or known[0] != spec:
            known = self._indexes[spec.run] = (spec, ManifestIndex(Path(spec.output), spec.total))
            if len(self._indexes) > _OPEN_RUNS:
                self._indexes.popitem(last=False)
        self._indexes.move_to_end(spec.run)
        return known[1]

    @contextmanager
    def _minding(self, run: str) -> Iterator[None]:
        """A destination that takes no rows pauses its run and burns nothing: the dump stays, its job comes again."""
        try:
            yield
        except DestinationFull as error:
            self._bus.runs.pause(run, DESTINATION_FULL)
            log.error("destination full: run paused until there is room", run=run, error=str(error))
            raise
        except Unavailable:
            if run in self._stores:  # its folder may have been replaced: the next job opens it anew
                self._close(run)
            raise
        except (Conflict, UsageError, Unreadable) as error:
            if run in self._stores:
                self._close(run)
            self._bus.runs.pause(run, str(error))
            log.error("run paused: its folder cannot take rows", run=run, error=str(error))
            raise

    @contextmanager
    def _renewing(self, request: RequestId, job: int) -> Iterator[None]:
        """Keep the storing lease while the row is written, however long that takes."""
        done = threading.Event()

        def renew() -> None:
            while not done.wait(self._bus.requests.leases.storing / 3):
                try:
                    self._bus.requests.begin_store(request, job, self._site)
                except Exception as error:  # noqa: BLE001 - whatever it is, the next renewal may succeed
                    log.warning("storing lease not renewed", error=f"{type(error).__name__}: {error}")

        thread = threading.Thread(target=renew, name="lease", daemon=True)
        thread.start()
        try:
            yield
        finally:
            done.set()
            thread.join()


def _place(folder: Path) -> tuple[int, int]:
    """Which folder lies under this path now; another one may have been mounted over it."""
    with guard(folder):
        found = folder.stat()
    return found.st_dev, found.st_ino


def _count(request: RequestId, nbytes: int, seconds: float) -> None:
    metrics.ROWS_STORED.labels(request.run).inc()
    metrics.TOKENS_STORED.labels(request.run).inc(request.tokens)
    metrics.BYTES_STORED.labels(request.run).inc(nbytes)
    metrics.STAGE_SECONDS.labels("store").observe(seconds)

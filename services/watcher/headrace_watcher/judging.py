"""Decides what becomes of each dump and each notice, and remembers it, so that none is judged twice."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from structlog.contextvars import bound_contextvars

from headrace import logs, metrics
from headrace.bus import Bus
from headrace.bus.values import AttemptKind, CaptureOutcome
from headrace.dumpfolder import read_dump, read_lost
from headrace.dumps import DUMP_SUFFIX, Dump
from headrace.errors import Unreadable
from headrace.ids import RequestId
from headrace.messages import StoreJob
from headrace.quarantine import Quarantine
from headrace.runs import Identity, RunSpec
from headrace.verdicts import LOSSES, LOST_REASONS, Reason, Refusal, Requirement, judge
from headrace_watcher.folder import DumpFolder, Entry, Listing

log = logs.get(__name__)

_SWEEPABLE = {
    "done": "its sample is stored already",
    "closed": "its sample failed or was rejected",
    "unknown_request": "its run knows no such request",
    "unreadable_run": "its run's spec cannot be read",
}


@dataclass(slots=True, kw_only=True)
class _Memory:
    """What is known of one file: its storage job k, or since when it waits, or the refusal that ended its attempt.

    `counted` as a match, or as a `duplicate`: a file that cannot be removed is judged again.
    """

    inode: int
    job: int = 0
    waiting_since: float | None = None
    not_before: float = 0.0
    refusal: Refusal | None = None
    counted: bool = False
    duplicate: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class _Proven:
    """A dump that matched, and what the bus made of it."""

    outcome: CaptureOutcome
    identity: Identity


class Judge:
    """Judges the files of one folder. Every call may raise Unavailable; it is then repeated and nothing is lost.

    Times are in the caller's seconds, except that `wall` tells how long a dump has been there.
    """

    def __init__(
        self,
        bus: Bus,
        folder: DumpFolder,
        quarantine: Quarantine,
        *,
        grace: float,
        retry: float,
        wall: Callable[[], float] = time.time,
    ) -> None:
        """A dump that nobody asked for goes after `grace` seconds, and is asked about every `retry` until then."""
        self._bus = bus
        self._folder = folder
        self._quarantine = quarantine
        self._grace = grace
        self._retry = retry
        self._wall = wall
        self._memory: dict[str, _Memory] = {}
        self._specs: dict[str, RunSpec | None] = {}
        self._measured: Mapping[int, int] = {}

    def begin(self) -> None:
        """Begin a pass over the folder: what runs require is asked anew."""
        self._specs.clear()

    def forget(self, listing: Listing) -> None:
        """Forget the files that are gone."""
        present = {entry.name for entry in (*listing.dumps, *listing.notices)}
        for name in self._memory.keys() - present:
            del self._memory[name]

    def reopen(self) -> None:
        """Redis was away and may have lost its last second: every captured dump is judged, and queued, again."""
        for memory in self._memory.values():
            memory.job = 0

    def measured(self, listing: Listing) -> None:
        """This listing's size was published: captures add only bytes that it did not see."""
        self._measured = listing.sizes

    def hold(self, listing: Listing) -> None:
        """Renew the leases of what is here or still queued; what is captured no more is judged again."""
        here = [str(entry.request) for entry in listing.dumps if not entry.request.is_canary]
        lost = set(self._bus.requests.hold(self._folder.site, here, self._bus.jobs.queued(self._folder.site)))
        for entry in listing.dumps:
            memory = self._memory.get(entry.name)
            if memory is not None and memory.job and str(entry.request) in lost:
                memory.job = 0

    def dump(self, entry: Entry, now: float) -> None:
        """Judge a dump, unless its verdict is known."""
        memory = self._remember(entry)
        if memory.job or now < memory.not_before:
            return
        with bound_contextvars(request=str(entry.request)):
            if memory.refusal is not None:
                self._put_away(entry, memory, now)
                return
            decision = self._decide(entry)
            if isinstance(decision, Refusal):
                self._refuse(entry, memory, decision, now)
            elif isinstance(decision, _Proven) and decision.outcome.outcome == "captured":
                self._captured(entry, memory, decision)
            elif isinstance(decision, _Proven) and decision.outcome.outcome == "duplicate":
                if not memory.duplicate:
                    memory.duplicate = True
                    metrics.DUPLICATES.labels(entry.request.run).inc()
                    log.info("duplicate: another request of the sample was captured")
                self._remove(entry, memory, now)
            elif decision is not None:
                outcome = decision.outcome.outcome if isinstance(decision, _Proven) else decision
                self._wait(entry, memory, outcome, now)

    def notice(self, entry: Entry, now: float) -> None:
        """End the attempt whose states the engine could not publish."""
        memory = self._remember(entry)
        if now < memory.not_before:
            return
        with bound_contextvars(request=str(entry.request)):
            if memory.refusal is None:
                try:
                    lost = read_lost(self._folder.path / entry.name)
                except FileNotFoundError:
                    return
                except Unreadable as error:
                    loss = Refusal(reason=Reason.INTERNAL, detail=f"a notice that cannot be read: {error}")
                else:
                    known = lost.reason in LOST_REASONS
                    detail = lost.detail if known else f"unknown reason {lost.reason!r}: {lost.detail}"
                    loss = Refusal(reason=Reason(lost.reason) if known else Reason.INTERNAL, detail=detail)
                self._lose(entry.request, memory, loss)
            self._remove(entry, memory, now)

    def _lose(self, request: RequestId, memory: _Memory, loss: Refusal) -> None:
        dump = self._memory.get(f"{request}{DUMP_SUFFIX}")
        if dump is not None and dump.job:
            # A proven dump wins: a notice beside it must not take the sample from the writer.
            log.warning("notice of a captured request ignored", reason=loss.reason, detail=loss.detail)
            memory.refusal = loss
        else:
            self._end(request, memory, loss)

    def _remember(self, entry: Entry) -> _Memory:
        memory = self._memory.get(entry.name)
        if memory is None or memory.inode != entry.inode:
            memory = self._memory[entry.name] = _Memory(inode=entry.inode)
        return memory

    def _decide(self, entry: Entry) -> Refusal | _Proven | str | None:
        """A refusal, what the bus made of a match, why there is no verdict yet, or None when the dump is gone."""
        request = entry.request
        try:
            spec = self._spec(request.run)
        except Unreadable as error:
            log.warning("not judged", error=str(error))
            return "unreadable_run"
        if spec is None:
            return "unknown_run"
        try:
            dump = read_dump(self._folder.path / entry.name)
        except FileNotFoundError:
            return None
        except Unreadable as error:
            return Refusal(reason=Reason.UNREADABLE, detail=str(error))
        decision = self._capture(entry, dump, spec)
        if isinstance(decision, _Proven) and decision.outcome.outcome == "identity":
            # Another dump made the run's first row between our two questions: the identity is known now.
            decision = self._capture(entry, dump, spec)
        return decision

    def _spec(self, run: str) -> RunSpec | None:
        if run not in self._specs:
            self._specs[run] = self._bus.runs.spec(run)
            if self._specs[run] is not None:
                metrics.see_run(run)
        return self._specs[run]

    def _capture(self, entry: Entry, dump: Dump, spec: RunSpec) -> Refusal | _Proven:
        request = entry.request
        verdict = judge(dump, request, Requirement.of(spec, self._bus.runs.identity(request.run)))
        if isinstance(verdict, Refusal):
            return verdict
        # The credit ends here. Bytes that the last published measurement saw already are not added to it again.
        fresh = max(0, entry.nbytes - self._measured.get(entry.inode, 0))
        outcome = self._bus.requests.capture(request, self._folder.site, fresh, verdict.identity)
        return _Proven(outcome=outcome, identity=verdict.identity)

    def _captured(self, entry: Entry, memory: _Memory, proven: _Proven) -> None:
        # After a crash between the two, capture() gives the same k again, and the queue knows that job or takes it.
        job = StoreJob(
            request=str(entry.request),
            sample=proven.outcome.sample,
            job=proven.outcome.job,
            mask=proven.outcome.mask,
            engine=proven.identity.engine,
            weight_version=proven.identity.weight_version,
        )
        self._bus.jobs.queue_store(self._folder.site, job)
        memory.job = job.job
        memory.waiting_since = None
        if not memory.counted:
            memory.counted = True
            metrics.VERDICTS.labels(entry.request.run).inc()
            metrics.STAGE_SECONDS.labels("judge").observe(max(0.0, self._wall() - entry.published))
        log.info("captured", job=job.job)

    def _refuse(self, entry: Entry, memory: _Memory, refusal: Refusal, now: float) -> None:
        # The attempt ends before the dump leaves: a crash in between leaves the dump, the next watcher judges it
        # again, and a repeated end changes and counts nothing. The other way round a crash would leave an attempt
        # that only its lease ends, as a lost dump instead of a mismatch.
        self._end(entry.request, memory, refusal)
        self._put_away(entry, memory, now)

    def _end(self, request: RequestId, memory: _Memory, refusal: Refusal) -> None:
        reason = refusal.reason
        kind: AttemptKind = "loss" if reason in LOSSES else "mismatch"
        outcome = self._bus.requests.end(request, burn=reason is not Reason.NO_ROOM, kind=kind, reason=reason)
        memory.refusal = refusal
        if kind == "loss":
            metrics.LOSSES_TOTAL.labels(reason).inc()
        elif outcome != "unknown" or reason is Reason.UNKNOWN_RUN:
            # A request that Redis does not know counts as neither, as its match would have.
            metrics.see_run(request.run)
            metrics.VERDICTS.labels(request.run).inc()
            metrics.MATCH_FAILURES.labels(request.run, reason).inc()
        log.warning("lost" if kind == "loss" else "refused", reason=reason, detail=refusal.detail, sample=outcome)

    def _put_away(self, entry: Entry, memory: _Memory, now: float) -> None:
        assert memory.refusal is not None
        try:
            self._quarantine.take(self._folder.path / entry.name, entry.request, memory.refusal, self._folder.site)
        except OSError as error:
            self._stuck(entry, memory, error, now)

    def _wait(self, entry: Entry, memory: _Memory, outcome: str, now: float) -> None:
        if memory.waiting_since is None:
            memory.waiting_since = now
        end = memory.waiting_since + self._grace
        if now < end:
            memory.not_before = min(now + self._retry, end)
        elif outcome == "unknown_run":
            detail = f"Redis knows no run {entry.request.run!r}, and did not for {self._grace:g} s"
            self._refuse(entry, memory, Refusal(reason=Reason.UNKNOWN_RUN, detail=detail), now)
        elif outcome in _SWEEPABLE:
            log.info("swept", reason=_SWEEPABLE[outcome])
            self._remove(entry, memory, now)

    def _remove(self, entry: Entry, memory: _Memory, now: float) -> None:
        try:
            (self._folder.path / entry.name).unlink(missing_ok=True)
        except OSError as error:
            self._stuck(entry, memory, error, now)

    def _stuck(self, entry: Entry, memory: _Memory, error: OSError, now: float) -> None:
        memory.not_before = now + self._grace
        log.error("cannot be removed; may this user write the dump folder?", file=entry.name, error=str(error))

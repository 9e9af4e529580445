"""The only retry: ends lapsed leases, queues lost storage jobs again, evicts dead sites, rebuilds a lost Redis."""

from __future__ import annotations

import os
import secrets
import shutil
import tempfile
import time
from pathlib import Path

from headrace import logs, metrics
from headrace.bus import Bus
from headrace.bus.values import DESTINATION_FULL, RunView, Unrecorded
from headrace.errors import RedisAway, Unreadable
from headrace.ids import RequestId
from headrace.messages import Record, RecordJob
from headrace_dispatcher.catalog import Catalog
from headrace_dispatcher.inputs import Inputs, Sample
from headrace_dispatcher.isolation import Isolation
from headrace_dispatcher.mismatches import MismatchLimit
from headrace_dispatcher.patience import Patience
from headrace_dispatcher.rebuild import rebuild

log = logs.get(__name__)

_PROBE_SECONDS = 3.0
_FORGET_SECONDS = 3600.0  # `headrace list` shows for so long a run that was ended for somebody who is gone
_SPARE = 1 << 20  # bytes that must be free beyond two rows before a full destination is tried again


class Reaper:
    """One pass looks at every run and site; passes of several dispatchers do no harm to each other."""

    def __init__(
        self, bus: Bus, catalog: Catalog, patience: Patience, limit: MismatchLimit, rebuild_after: float = 30.0
    ) -> None:
        """Work over this bus. A run that is `rebuilding` for so many seconds was left behind by who began it."""
        self._bus = bus
        self._catalog = catalog
        self._patience = patience
        self._limit = limit
        self._rebuild_after = rebuild_after
        self._runs = Isolation(bus)
        self._server = ""
        self._probed: dict[str, float] = {}
        self._rebuilding: dict[str, float] = {}
        self._shown: set[str] = set()
        self._left_out: dict[str, str] = {}

    def pass_once(self) -> None:
        """Do what is due.

        Raises:
            RedisAway: the next pass does it, and is patient with leases.
        """
        try:
            self._pass()
        except RedisAway:
            self._patience = self._patience.lost()
            raise

    def _pass(self) -> None:
        server, now = self._bus.server_clock()
        self._patience = self._patience.begun(server, now)
        self._bring_back(server)
        shown, ended, rebuilding = set[str](), set[str](), dict[str, float]()
        for view in self._runs.views():
            run = view.spec.run
            with self._runs.isolated(view):
                self._run(view, now)
            if view.state in ("finished", "cancelled"):
                ended.add(run)
            else:
                metrics.QUEUE_DEPTH.labels(f"pending-{run}").set(view.pending)
                metrics.RUN_PAUSED.labels(run).set(int(view.state == "paused"))
                shown.add(run)
            if view.state == "rebuilding":
                rebuilding[run] = self._rebuilding.get(run, time.monotonic())
        for run in self._shown - shown:
            metrics.QUEUE_DEPTH.remove(f"pending-{run}")
            metrics.RUN_PAUSED.remove(run)
        self._shown, self._rebuilding = shown, rebuilding
        for site in self._bus.sites.names():
            self._site(site)
        still, now = self._bus.server_clock()
        if still == server:
            for run in ended:
                self._catalog.forget(run)
        self._patience = self._patience.ended(now)

    def _bring_back(self, server: str) -> None:
        """Rebuild the runs that Redis may have set back, or lost: all that are served, where it is another server."""
        another = self._server not in ("", server)
        served = self._catalog.served()
        names = self._bus.runs.names()
        for view in served:
            if another or view.spec.run not in names:
                with self._runs.isolated(view):
                    self._rebuild(view)
        self._server = server

    def _rebuild(self, view: RunView) -> None:
        run = view.spec.run
        known = self._bus.runs.get(run)
        if known is not None and known.state == "cancelled":
            return
        learnt = rebuild(self._bus, view.spec, same_folder=True)
        if known is None and view.state == "paused":
            self._bus.runs.pause(run, view.reason)
        log.warning("run brought up to its manifest", run=run, learnt=learnt)

    def _run(self, view: RunView, now: float) -> None:
        run = view.spec.run
        if view.only_until is not None:
            self._of_one_site(view, now)
        began = self._rebuilding.get(run)
        if view.state == "rebuilding" and began is not None and time.monotonic() - began >= self._rebuild_after:
            self._rebuild(view)
        ended, records = self._bus.requests.reap_run(run, self._patience.lapsed_before)
        for entry in ended:
            metrics.LAPSES.labels(run, entry.reason).inc()
            log.warning("attempt lapsed", request=entry.request, outcome=entry.outcome, reason=entry.reason)
        if records:
            self._record(view, records)
        if view.state == "paused" and view.reason == DESTINATION_FULL and self._has_room(view):
            log.info("destination has room again", run=run)
            self._bus.runs.activate(run, paused_for=DESTINATION_FULL)
        if view.state == "active":
            self._bus.runs.mark_rate(run)
            watch_verdicts(self._bus, view, self._limit)

    def _of_one_site(self, view: RunView, now: float) -> None:
        """End what whoever wanted the run did not end, and keep nothing of it for longer than itself."""
        run = view.spec.run
        if view.state in ("finished", "cancelled"):
            self._bus.runs.expire_rest(run)
        elif view.only_until is not None and now > view.only_until:
            log.warning("a run of somebody who is gone is ended", run=run)
            self._bus.runs.cancel(run)
            self._bus.runs.expire(run, _FORGET_SECONDS)

    def _record(self, view: RunView, records: list[Unrecorded]) -> None:
        sites = [site for site in self._bus.sites.registered() if view.only_site in ("", site.site)]
        if not sites:
            return  # the lease of the records lapses, and a later pass finds them again
        with self._catalog.reading(view.spec) as inputs:
            job = RecordJob(run=view.spec.run, records=tuple(_record(inputs, entry) for entry in records))
        site = secrets.choice(sites).site
        self._bus.jobs.queue_record(site, job, f"record-{job.run}-{secrets.token_hex(8)}")
        log.info("lines of samples without a row queued", run=job.run, site=site, lines=len(records))

    def _has_room(self, view: RunView) -> bool:
        """Whether a row or two would fit; asked every few seconds. A wrong guess only pauses the run again."""
        now = time.monotonic()
        if now - self._probed.get(view.spec.run, -_PROBE_SECONDS) < _PROBE_SECONDS:
            return False
        self._probed[view.spec.run] = now
        rows = 2 * view.bytes // max(1, view.stored)
        output = Path(view.spec.output)
        try:
            if shutil.disk_usage(output).free < rows + _SPARE:
                return False
            # A quota is not seen in the free bytes: ask for some.
            with tempfile.TemporaryFile(dir=output) as file:
                os.posix_fallocate(file.fileno(), 0, _SPARE)
        except OSError as error:
            log.warning("destination still takes nothing", run=view.spec.run, error=str(error))
            return False
        return True

    def _site(self, name: str) -> None:
        ended, jobs = self._bus.requests.reap_site(name, self._patience.lapsed_before)
        for request in ended:
            metrics.LAPSES.labels(RequestId.parse(request).run, "dump_gone").inc()
            log.warning("captured dump is gone", request=request, site=name)
        for job in jobs:
            self._bus.jobs.queue_store(name, job)
            log.warning("storage job queued again", request=job.request, job=job.job, site=name)
        try:
            lapsed = self._bus.sites.get(name) is None
        except Unreadable as error:
            lapsed = False
            if self._left_out.get(name) != str(error):
                self._left_out[name] = str(error)
                log.warning("site left out", site=name, error=str(error))
        else:
            self._left_out.pop(name, None)
        if lapsed and self._bus.sites.evict(name):
            log.warning("site evicted", site=name)


def watch_verdicts(bus: Bus, view: RunView, limit: MismatchLimit) -> None:
    """Pause an active run whose window passes the limit; otherwise let the window move on."""
    run = view.spec.run
    reason = limit.passed_by(view.window)
    if not reason:
        bus.runs.mark_verdicts(run, limit.least)
    elif bus.runs.pause_for(run, reason, view.window):
        log.error("run paused: too many mismatches", run=run, reason=reason)


def _record(inputs: Inputs, entry: Unrecorded) -> Record:
    sample = inputs[entry.ordinal]
    tokens = RequestId.parse(entry.request).tokens if entry.request else 0
    # With its request, the mask proves a row that may be there all the same.
    mask = sample.mask if isinstance(sample, Sample) and entry.status == "failed" and entry.request else ()
    return Record(
        ordinal=entry.ordinal,
        sample=sample.sample,
        status=entry.status,
        reason=entry.reason,
        request=entry.request,
        tokens=tokens,
        mask=mask,
    )

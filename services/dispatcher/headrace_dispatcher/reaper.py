"""The only retry: ends lapsed leases, queues lost storage jobs again, evicts dead sites, rebuilds a lost Redis."""

from __future__ import annotations

import secrets
import shutil
from pathlib import Path

from headrace import logs, metrics
from headrace.bus import Bus
from headrace.bus.values import DESTINATION_FULL, RunView, Unrecorded
from headrace.errors import HeadraceError, Unavailable
from headrace.ids import RequestId
from headrace.messages import Record, RecordJob
from headrace_dispatcher.catalog import Catalog
from headrace_dispatcher.inputs import Inputs
from headrace_dispatcher.rebuild import rebuild

log = logs.get(__name__)

_SPARE = 1 << 20  # bytes that must be free beyond what waits to be stored, before a full destination is tried again


class Reaper:
    """One pass looks at every run and site; passes of several dispatchers do no harm to each other."""

    def __init__(self, bus: Bus, catalog: Catalog) -> None:
        """Work over this bus."""
        self._bus = bus
        self._catalog = catalog
        self._server = ""

    def pass_once(self) -> None:
        """Do what is due.

        Raises:
            Unavailable: Redis is away; the next pass does it.
        """
        self._notice_another_server()
        for run in self._bus.runs.names():
            self._run(run)
        for site in self._bus.sites.names():
            self._site(site)

    def _notice_another_server(self) -> None:
        server = self._bus.server_run_id()
        if self._server and server != self._server:
            for spec in list(self._catalog.specs.values()):
                try:
                    learnt = rebuild(self._bus, spec)
                except HeadraceError as error:
                    if isinstance(error, Unavailable):
                        raise
                    log.error("rebuild failed", run=spec.run, error=str(error))
                else:
                    log.warning("redis restarted: run rebuilt from its manifest", run=spec.run, learnt=learnt)
        self._server = server

    def _run(self, name: str) -> None:
        view = self._bus.runs.get(name)
        if view is None:
            return
        ended, records = self._bus.requests.reap_run(name)
        for entry in ended:
            log.warning("attempt lapsed", request=entry.request, outcome=entry.outcome, reason=entry.reason)
        if records:
            self._record(view, records)
        if view.state == "paused" and view.reason == DESTINATION_FULL and self._has_room(view):
            log.info("destination has room again", run=name)
            self._bus.runs.activate(name)
        if view.state == "active":
            self._bus.runs.mark_rate(name)
        metrics.QUEUE_DEPTH.labels(f"pending-{name}").set(view.pending)

    def _record(self, view: RunView, records: list[Unrecorded]) -> None:
        sites = self._bus.sites.registered()
        inputs = self._catalog.inputs(self._bus, view.spec)
        if not sites or inputs is None:
            return  # the lease of the records lapses, and the next pass finds them again
        run = view.spec.run
        job = RecordJob(run=run, records=tuple(_record(inputs, entry) for entry in records))
        site = secrets.choice(sites).site
        self._bus.jobs.queue_record(site, job, f"record-{run}-{secrets.token_hex(8)}")
        log.info("lines of samples without a row queued", run=run, site=site, lines=len(records))

    def _has_room(self, view: RunView) -> bool:
        waiting = sum(site.dump_bytes for site in self._bus.sites.registered())
        try:
            return shutil.disk_usage(Path(view.spec.output)).free >= waiting + _SPARE
        except OSError as error:
            log.warning("destination unreadable", run=view.spec.run, error=str(error))
            return False

    def _site(self, name: str) -> None:
        ended, jobs = self._bus.requests.reap_site(name)
        for request in ended:
            log.warning("captured dump is gone", request=request, site=name)
        for job in jobs:
            self._bus.jobs.queue_store(name, job)
            log.warning("storage job queued again", request=job.request, job=job.job, site=name)
        if self._bus.sites.get(name) is None and self._bus.sites.evict(name):
            log.warning("site evicted", site=name)


def _record(inputs: Inputs, entry: Unrecorded) -> Record:
    sample = inputs[entry.ordinal]
    tokens = RequestId.parse(entry.request).tokens if entry.request else 0
    return Record(
        ordinal=entry.ordinal,
        sample=sample.sample,
        status=entry.status,
        reason=entry.reason,
        request=entry.request,
        tokens=tokens,
    )

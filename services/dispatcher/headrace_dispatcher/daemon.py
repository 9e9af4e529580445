"""The dispatcher's loop: feed each run's window, claim within each site's room, post, reap; drain on SIGTERM."""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable, Iterator, Sequence

from headrace import logs, metrics
from headrace.bus import Bus
from headrace.bus.values import Attempt, RunView, Site
from headrace.errors import Unavailable
from headrace.flow import feed_size, room
from headrace.ids import NONCE_ALPHABET, NONCE_LENGTH, RequestId
from headrace.reasons import Reason
from headrace.service import Service
from headrace_dispatcher.catalog import Catalog
from headrace_dispatcher.engines import Answer, EngineClient
from headrace_dispatcher.flights import Flight, Flights
from headrace_dispatcher.inputs import Inputs, Sample
from headrace_dispatcher.isolation import Isolation
from headrace_dispatcher.plan import Fit, Limits, choose, dump_bytes
from headrace_dispatcher.reaper import Reaper

log = logs.get(__name__)

EXCEEDS_ENGINE = "exceeds_engine"

_TICK_SECONDS = 0.25
_FEED_BATCH = 200
_CLAIM_BATCH = 64
_PEEK = 256  # pending samples that are looked at for one site
_ENGINE_PAUSE_SECONDS = 1.0  # after an engine was unavailable


def loop(service: Service) -> None:
    """Serve every run until the stop event; the console script's body."""
    Dispatcher(service, Bus.from_settings(service.settings)).run()


class Dispatcher:
    """Serves all runs; several dispatchers may run beside each other."""

    def __init__(self, service: Service, bus: Bus) -> None:
        """Serve the runs of this bus until `service.stop`."""
        self._service = service
        self._bus = bus
        self._catalog = Catalog()
        self._wake = threading.Event()
        self._paused_until: dict[str, float] = {}
        self._waiting: dict[str, str] = {}
        self._turn = 0
        self._nowhere: dict[tuple[str, int], float] = {}
        self._crash: BaseException | None = None
        self._runs = Isolation(bus)
        self._flights = Flights(bus, EngineClient(service.settings.engine_timeout_seconds), self._landed)
        self._reaper = Reaper(bus, self._catalog)

    def run(self) -> None:
        """Work until the stop event, then drain."""
        settings = self._service.settings
        done = threading.Event()
        renewer = self._repeat("renew", settings.lease_in_flight_seconds / 3, self._flights.renew, done)
        reaper = self._repeat("reap", settings.reap_seconds, self._reaper.pass_once, self._service.stop)
        log.info("dispatching", redis=self._bus.where)
        while not self._service.stop.is_set():
            self._guarded(self._tick)
            self._wake.wait(_TICK_SECONDS)
            self._wake.clear()
        self._drain(settings.drain_seconds)
        done.set()
        renewer.join()
        reaper.join()
        self._catalog.close()
        self._bus.close()
        if self._crash is not None:
            raise self._crash

    def _drain(self, seconds: float) -> None:
        log.info("draining", in_flight=self._flights.count())
        until = time.monotonic() + seconds
        while self._flights.count() and time.monotonic() < until:
            self._wake.wait(_TICK_SECONDS)
            self._wake.clear()
        self._flights.close()
        log.info("drained")

    def _repeat(self, name: str, every: float, work: Callable[[], None], until: threading.Event) -> threading.Thread:
        def body() -> None:
            try:
                while not until.wait(every):
                    self._guarded(work)
            except BaseException as error:  # a dead thread must end the process, not leave half of it
                self._crash = error
                self._service.stop.set()
                raise

        thread = threading.Thread(target=body, name=name, daemon=True)
        thread.start()
        return thread

    def _guarded(self, work: Callable[[], None]) -> None:
        try:
            work()
            self._service.health.set("redis")
        except Unavailable as error:
            self._service.health.set("redis", str(error))
            log.warning("redis is away", error=str(error))
            self._service.stop.wait(1.0)

    def _landed(self, flight: Flight, answer: Answer) -> None:
        if answer.outcome == "unavailable" or answer.reason == Reason.NO_ROOM:
            self._paused_until[flight.site] = time.monotonic() + _ENGINE_PAUSE_SECONDS
        self._wake.set()

    def _tick(self) -> None:
        active: list[RunView] = []
        for view in self._runs.views():
            if view.state in ("finished", "cancelled"):
                self._catalog.forget(view.spec.run)
                continue
            self._catalog.serve(view)
            if view.state == "active":
                active.append(view)
        sites = self._bus.sites.registered()
        self._turn += 1
        for index in range(len(active)):
            # Each tick begins with another run, so that none is starved.
            view = active[(index + self._turn) % len(active)]
            with self._runs.isolated(view.spec.run), self._catalog.reading(self._bus, view.spec) as inputs:
                if inputs is not None:
                    self._feed(view, inputs)
                    self._spread(view, inputs, sites)
                    self._say_waiting(view, sites)

    def _feed(self, view: RunView, inputs: Inputs) -> None:
        size = feed_size(self._service.settings.window, view.fed, _FEED_BATCH)
        stop = min(view.cursor + size, view.spec.total)
        if stop <= view.cursor:
            return
        entries = [inputs[ordinal] for ordinal in range(view.cursor, stop)]
        reasons = ["" if isinstance(entry, Sample) else entry.reason for entry in entries]
        if self._bus.runs.feed(view.spec.run, view.cursor, reasons) is not None:
            self._wake.set()

    def _spread(self, view: RunView, inputs: Inputs, sites: Sequence[Site]) -> None:
        fit = [site for site in sites if not site.unfit_for(view.spec)]
        for site in fit:
            if self._paused_until.get(site.site, 0.0) <= time.monotonic():
                self._fill(site, view, inputs, [_limits(other) for other in fit if other is not site])

    def _fill(self, site: Site, view: RunView, inputs: Inputs, others: Sequence[Limits]) -> None:
        load = self._bus.sites.load(site)
        metrics.IN_FLIGHT_TOKENS.labels(site.site).set(load.tokens)
        free = room(site.caps, load)
        if free.requests == 0:
            return
        run, here = view.spec.run, _limits(site)
        seen: list[Sample] = []

        def lengths() -> Iterator[int]:
            for ordinal in self._bus.runs.pending(run, _PEEK):
                entry = inputs[ordinal]
                if isinstance(entry, Sample):
                    seen.append(entry)
                    yield len(entry.ids)

        chosen: list[tuple[Attempt, Flight]] = []
        for index, decision in enumerate(choose(lengths(), free, here, others)):
            sample = seen[index]
            if decision is Fit.NOWHERE:
                self._reject_in_time(run, sample)
            elif decision is Fit.NOW:
                chosen.append(_attempt(site, here, view, sample))
            if len(chosen) == _CLAIM_BATCH:
                break
        if not chosen:
            return
        answers = self._bus.requests.claim(run, site.site, site.boot, [attempt for attempt, _ in chosen])
        for answer, (_, flight) in zip(answers, chosen, strict=True):
            if answer == "claimed":
                self._flights.start(flight, site.max_requests)

    def _reject_in_time(self, run: str, sample: Sample) -> None:
        """Reject a sample that no site can take, once that has held for a while: a larger site may be restarting."""
        now = time.monotonic()
        since = self._nowhere.setdefault((run, sample.ordinal), now)
        if now - since >= 2 * self._service.settings.site_ttl_seconds:
            del self._nowhere[run, sample.ordinal]
            self._bus.requests.reject(run, sample.ordinal, EXCEEDS_ENGINE)
            log.warning("sample fits no engine", run=run, ordinal=sample.ordinal, tokens=len(sample.ids))

    def _say_waiting(self, view: RunView, sites: Sequence[Site]) -> None:
        run = view.spec.run
        if any(not site.unfit_for(view.spec) for site in sites):
            what = ""
        elif not sites:
            what = "no engine is registered: is a watcher running, and did its canary match?"
        else:
            what = "; ".join(f"engine {site.url}: {site.unfit_for(view.spec)}" for site in sites)
        if self._waiting.get(run) != what or view.waiting_for != what:
            self._waiting[run] = what
            self._bus.runs.say_waiting(run, what)


def _limits(site: Site) -> Limits:
    return Limits(caps=site.caps, context_length=site.context_length, bytes_per_token=site.bytes_per_token)


def _attempt(site: Site, limits: Limits, view: RunView, sample: Sample) -> tuple[Attempt, Flight]:
    nonce = "".join(secrets.choice(NONCE_ALPHABET) for _ in range(NONCE_LENGTH))
    request = RequestId.make(view.spec.run, sample.ordinal, nonce, sample.ids)
    attempt = Attempt(
        ordinal=sample.ordinal,
        request=str(request),
        tokens=request.tokens,
        dump_bytes=dump_bytes(request.tokens, limits),
        sample=sample.sample,
        mask=sample.mask,
    )
    return attempt, Flight(request=request, site=site.site, url=site.url, token_ids=sample.ids)

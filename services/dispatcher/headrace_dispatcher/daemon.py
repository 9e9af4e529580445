"""The dispatcher's process: a loop over all runs, threads that renew and reap, and a drain on SIGTERM."""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable, Sequence

from headrace import logs
from headrace.bus import Bus
from headrace.bus.values import RunView, Site
from headrace.errors import RedisAway
from headrace.service import Service
from headrace_dispatcher.catalog import Catalog
from headrace_dispatcher.circuits import Circuits
from headrace_dispatcher.engines import EngineClient
from headrace_dispatcher.flights import Flight, Flights
from headrace_dispatcher.isolation import Isolation
from headrace_dispatcher.mismatches import MismatchLimit
from headrace_dispatcher.patience import Patience
from headrace_dispatcher.reaper import Reaper
from headrace_dispatcher.spread import Spreader

log = logs.get(__name__)

_TICK_SECONDS = 0.25
_AWAY_SECONDS = 1.0  # between attempts at a Redis that is away
_END_SECONDS = 3.0  # for the threads to end; one may wait for a Redis that is away


def loop(service: Service) -> None:
    """Serve every run until the stop event; the console script's body.

    Raises:
        UsageError: the Redis URL or the password is wrong.
    """
    bus = Bus.wait_for(service)
    if bus is not None:
        Dispatcher(service, bus).run()


class Dispatcher:
    """Serves all runs; several dispatchers may run beside each other."""

    def __init__(self, service: Service, bus: Bus) -> None:
        """Serve the runs of this bus until `service.stop`."""
        settings, leases = service.settings, bus.requests.leases
        self._service = service
        self._bus = bus
        self._name = secrets.token_hex(8)
        self._wake = threading.Event()
        self._turn = 0
        self._crash: BaseException | None = None
        self._catalog = Catalog()
        self._runs = Isolation(bus)
        client = EngineClient(settings.engine_timeout_seconds)
        self._circuits = Circuits(client.probe, self._wake.set, self._crashed)
        self._flights = Flights(bus, client, self._circuits.answered, self._wake.set, self._crashed)
        self._spreader = Spreader(bus, settings, self._circuits.admits, self._start)
        # A renewal comes with each third of a lease, so that a silence of half of one makes none lapse.
        patience = Patience(wait=leases.longest, silence=settings.reap_seconds + leases.shortest / 2)
        limit = MismatchLimit(share=settings.mismatch_limit, least=settings.mismatch_verdicts)
        self._reaper = Reaper(bus, self._catalog, patience, limit)

    def run(self) -> None:
        """Work until the stop event, then drain. A crash of any thread ends it as well, and is raised."""
        settings = self._service.settings
        ended = threading.Event()
        threads = (
            self._repeat("renew", settings.lease_in_flight_seconds / 3, self._renew, ended),
            self._repeat("reap", settings.reap_seconds, self._reaper.pass_once, self._service.stop),
        )
        log.info("dispatching", redis=self._bus.where, dispatcher=self._name)
        try:
            while not self._service.stop.is_set():
                self._guarded(self._tick)
                self._pause(_TICK_SECONDS)
            self._drain(settings.drain_seconds)
        finally:
            self._service.stop.set()
            self._flights.close()
            ended.set()
            for thread in threads:
                thread.join(_END_SECONDS)
            self._leave()
        if self._crash is not None:
            raise self._crash

    def _drain(self, seconds: float) -> None:
        log.info("draining", in_flight=self._flights.count())
        until = time.monotonic() + seconds
        while self._flights.count() and time.monotonic() < until:
            self._pause(_TICK_SECONDS)
        log.info("drained", in_flight=self._flights.count())

    def _leave(self) -> None:
        try:
            self._bus.dispatchers.leave(self._name)
        except RedisAway as error:
            log.warning("not signed off; the sign of life lapses by itself", error=str(error))
        self._catalog.close()
        self._bus.close()

    def _pause(self, seconds: float) -> None:
        self._wake.wait(seconds)
        self._wake.clear()

    def _repeat(self, name: str, every: float, work: Callable[[], None], until: threading.Event) -> threading.Thread:
        """Do the work now, and again and again in a thread of its own."""

        def body() -> None:
            try:
                self._guarded(work)
                while not until.wait(every):
                    self._guarded(work)
            except BaseException as error:  # noqa: BLE001 - the main thread raises it
                self._crashed(error)

        thread = threading.Thread(target=body, name=name, daemon=True)
        thread.start()
        return thread

    def _crashed(self, error: BaseException) -> None:
        """A thread died: the process ends rather than live on in half."""
        log.error("a thread died", thread=threading.current_thread().name, error=repr(error))
        self._crash = self._crash or error
        self._service.stop.set()
        self._wake.set()

    def _guarded(self, work: Callable[[], None]) -> None:
        health = self._service.health
        try:
            work()
            health.set("redis")
        except RedisAway as error:
            if "redis" not in health.problems():
                log.warning("Redis is away", error=str(error))
            health.set("redis", str(error))
            self._service.stop.wait(_AWAY_SECONDS)

    def _renew(self) -> None:
        lease = self._bus.requests.leases.in_flight
        self._bus.dispatchers.beat(self._name, lease)
        self._flights.renew()

    def _start(self, flight: Flight) -> None:
        self._circuits.sent(flight)
        self._flights.start(flight)

    def _tick(self) -> None:
        active: list[RunView] = []
        for view in self._runs.views():
            # One that ended is forgotten by the reaper: Redis may only have been set back to an end.
            if view.state not in ("finished", "cancelled"):
                self._catalog.serve(view)
            if view.state == "active":
                active.append(view)
            else:
                self._spreader.forget(view.spec.run)
        sites = self._bus.sites.registered()
        self._circuits.look(sites)
        self._turn += 1
        for index in range(len(active)):
            # Each tick begins with another run, so that none is starved.
            view = active[(index + self._turn) % len(active)]
            with self._runs.isolated(view):
                self._serve(view, sites)

    def _serve(self, view: RunView, sites: Sequence[Site]) -> None:
        sites = [site for site in sites if view.only_site in ("", site.site)]
        problems = {site.site: site.unfit_for(view.spec, view.identity) for site in sites}
        fit = [site for site in sites if not problems[site.site]]
        with self._catalog.reading(view.spec) as inputs:
            if self._spreader.feed(view, inputs):
                self._wake.set()
            self._spreader.spread(view, inputs, fit)
        if not sites:
            of_it = f" at site {view.only_site}" if view.only_site else ""
            what = f"no engine is registered{of_it}: is a watcher running, and did its canary match?"
        elif not fit:
            what = "; ".join(f"engine {site.url}: {problems[site.site]}" for site in sites)
        else:
            # One that has nothing to send cannot know that the engine fails, and would gainsay another dispatcher.
            what = self._circuits.waiting(fit) if view.pending else ""
        self._runs.say_waiting(view, what)

"""The watcher's loop: one thread that scans, judges and renews, and goes on while Redis or the engine is away."""

from __future__ import annotations

import threading
import time

from headrace import logs, metrics
from headrace.bus import Bus
from headrace.bus.values import Unregistered
from headrace.errors import Unavailable, UsageError
from headrace.quarantine import Quarantine
from headrace.service import Service
from headrace.settings import Settings
from headrace_watcher.admission import Admission
from headrace_watcher.engine import EngineClient
from headrace_watcher.events import watching
from headrace_watcher.folder import DumpFolder, Listing
from headrace_watcher.judging import Judge

log = logs.get(__name__)

_LONGEST_SLEEP = 0.5  # seconds: SIGTERM is seen within so long
_FIRST_PAUSE, _LONGEST_PAUSE = 0.25, 5.0  # seconds between attempts at a Redis that is away
_LONGEST_WHY = 2000  # characters


def loop(service: Service) -> None:
    """Watch the dump folder of the settings until the service is told to stop.

    Raises:
        UsageError: the folder, the quarantine, the Redis URL or the password is wrong.
        Conflict: another watcher serves the folder, or it was made anew.
    """
    settings = service.settings
    _check_quarantine(settings)
    wake = threading.Event()
    with (
        DumpFolder.open(settings.dump_dir) as folder,
        watching(folder.path, wake),
        EngineClient(settings.engine_url, wake) as client,
    ):
        log.info("watching", folder=str(folder.path), site=folder.site)
        Watcher(service, folder, client, wake).run()


def _check_quarantine(settings: Settings) -> None:
    """Refuse a place that can never hold a refused dump, and say what may hold one later."""
    place = settings.quarantine_dir
    if place.resolve().is_relative_to(settings.dump_dir.resolve()):
        raise UsageError(f"quarantine {place} lies in the dump folder; set HEADRACE_QUARANTINE_DIR")
    if settings.quarantine_bytes == 0:
        return
    try:
        place.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError) as error:
        raise UsageError(f"quarantine {place} is not a folder; set HEADRACE_QUARANTINE_DIR") from error
    except OSError as error:
        log.warning("refused dumps cannot be kept now", quarantine=str(place), error=str(error))


class Watcher:
    """One folder's watcher, between its lock and its stop."""

    def __init__(self, service: Service, folder: DumpFolder, client: EngineClient, wake: threading.Event) -> None:
        """Watch this folder; `wake` is set when there is something to do."""
        self._service = service
        self._settings = service.settings
        self._folder = folder
        self._wake = wake
        self._admission = Admission(folder, client, service.settings)
        self._bus: Bus | None = None
        self._judge: Judge | None = None
        # A watcher that was killed may have left its registration: the first heartbeat takes it back.
        self._announced = True
        self._missing = ""  # as it was published
        self._next_beat = 0.0
        self._redis_pause = 0.0
        self._redis_not_before = 0.0
        self._named: frozenset[str] = frozenset()
        metrics.SITE_UP.labels(folder.site).set(0)

    def run(self) -> None:
        """Run until the service is told to stop; the registration is then taken back and the dumps stay."""
        try:
            while not self._service.stop.is_set():
                self._wake.clear()
                self._round()
                self._sleep()
        finally:
            self._leave()

    def _round(self) -> None:
        now = time.monotonic()
        listing = self._folder.scan()
        self._name_foreign(listing)
        self._admission.step(listing, now)
        registration = self._admission.registration
        self._service.health.set("engine", registration.engine)
        self._service.health.set("canary", registration.canary)
        if registration.is_registered is not self._announced or registration.missing != self._missing:
            self._next_beat = now
        if now < self._redis_not_before:
            return
        try:
            self._judge_all(self._connected(), listing)
        except Unavailable as error:
            self._redis_is_away(str(error))
        else:
            self._redis_pause = 0.0
            self._service.health.set("redis")

    def _connected(self) -> tuple[Bus, Judge]:
        if self._bus is None or self._judge is None:
            settings = self._settings
            self._bus = Bus.from_settings(settings)
            self._judge = Judge(
                self._bus,
                self._folder,
                Quarantine(settings.quarantine_dir, settings.quarantine_bytes),
                grace=settings.orphan_grace_seconds,
                retry=settings.rescan_seconds,
            )
        return self._bus, self._judge

    def _redis_is_away(self, problem: str) -> None:
        self._redis_pause = min(_LONGEST_PAUSE, 2 * self._redis_pause or _FIRST_PAUSE)
        self._redis_not_before = time.monotonic() + self._redis_pause
        self._service.health.set("redis", problem)
        log.warning("Redis is away: dumps wait", error=problem, next_try_seconds=self._redis_pause)
        if self._judge is not None:
            self._judge.reopen()

    def _judge_all(self, connected: tuple[Bus, Judge], listing: Listing) -> None:
        bus, judge = connected
        judge.begin()
        for entry in listing.dumps:
            if self._service.stop.is_set():
                return
            self._beat_if_due(bus, judge)
            if not entry.request.is_canary:
                judge.dump(entry, time.monotonic())
        for entry in listing.notices:
            if self._service.stop.is_set():
                return
            self._beat_if_due(bus, judge)
            if not entry.request.is_canary:
                judge.notice(entry, time.monotonic())
        self._beat_if_due(bus, judge)
        judge.forget(listing)

    def _beat_if_due(self, bus: Bus, judge: Judge) -> None:
        now = time.monotonic()
        if now < self._next_beat:
            return
        self._folder.check()
        listing = self._folder.scan()
        registration = self._admission.registration
        # Nothing may be captured between the measurement and its publication: a capture gives back the bytes that
        # were promised, and the measurement must not hide the dump that took their place.
        if registration.is_registered and registration.card is not None:
            site = self._admission.site(registration.card, listing.nbytes)
            bus.sites.register(site, self._settings.site_ttl_seconds)
            in_flight = bus.sites.load(site).tokens
        else:
            in_flight = 0
            if self._announced:
                bus.sites.unregister(self._folder.site)
            why = registration.missing[:_LONGEST_WHY]
            entry = Unregistered(site=self._folder.site, url=self._settings.engine_url, why=why)
            bus.sites.explain(entry, self._settings.site_ttl_seconds)
        self._announced, self._missing = registration.is_registered, registration.missing
        judge.measured(listing)
        judge.hold(listing)
        name = self._folder.site
        metrics.SITE_UP.labels(name).set(int(self._announced))
        metrics.DUMP_DIR_BYTES.labels(name).set(listing.nbytes)
        metrics.IN_FLIGHT_TOKENS.labels(name).set(in_flight)
        metrics.QUEUE_DEPTH.labels(bus.jobs.rq_queue(name).name).set(bus.jobs.depth(name))
        self._next_beat = now + self._settings.heartbeat_seconds

    def _name_foreign(self, listing: Listing) -> None:
        """Say once of each file that it is not ours."""
        names = frozenset(listing.foreign)
        for name in sorted(names - self._named):
            log.warning("a file that is not a dump is left alone", file=ascii(name)[:200])
        self._named = names

    def _sleep(self) -> None:
        end = time.monotonic() + min(self._settings.rescan_seconds, self._settings.heartbeat_seconds)
        while not self._service.stop.is_set():
            left = end - time.monotonic()
            if left <= 0 or self._wake.wait(min(left, _LONGEST_SLEEP)):
                return

    def _leave(self) -> None:
        if self._bus is None:
            return
        try:
            if not self._redis_pause:
                self._bus.sites.unregister(self._folder.site)
        except Unavailable as error:
            log.warning("not unregistered; the registration lapses by itself", error=str(error))
        finally:
            self._bus.close()

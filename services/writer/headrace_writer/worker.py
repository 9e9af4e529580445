"""The writer's process: an RQ worker on its site's queue, one job after the other."""

from __future__ import annotations

import os
import secrets
import signal
import threading
import time
from pathlib import Path

from headrace import logs
from headrace.bus import Bus
from headrace.dumpfolder import read_site
from headrace.errors import Unavailable, Unreadable, UsageError
from headrace.ids import NONCE_ALPHABET
from headrace.service import Service
from headrace_writer.handler import Handler

log = logs.get(__name__)

_RETRY_SECONDS = 1.0
_LOOK_SECONDS = 2.0


def loop(service: Service) -> None:
    """Store the jobs of the folder's site until the stop event; the console script's body."""
    settings = service.settings
    bus = Bus.wait_for(service)
    if bus is None:
        return
    site = _await_site(service, settings.dump_dir)
    if site is None:
        return
    service.health.set("site")
    writer = "w" + "".join(secrets.choice(NONCE_ALPHABET) for _ in range(10))
    handler = Handler(bus, site, settings.dump_dir, writer, settings)
    log.info("storing", site=site, writer=writer, dump_dir=str(settings.dump_dir))
    moved = _leave_with_site(service, settings.dump_dir, site)
    try:
        _work(service, bus, site, writer, handler)
    finally:
        handler.close()
        bus.close()
    if moved.is_set():
        raise Unavailable(f"{settings.dump_dir} is another site's folder now; start this writer again")


def _await_site(service: Service, folder: Path) -> str | None:
    """The site's id, once the watcher has written it; None when the writer is stopped before.

    Raises:
        UsageError: it is no folder, or what it holds cannot be read.
    """
    said = False
    while not service.stop.is_set():
        try:
            site = read_site(folder)
        except Unreadable as error:
            raise UsageError(f"dump folder {folder}: {error}; set HEADRACE_DUMP_DIR to the watcher's folder") from error
        if site is not None:
            return site
        service.health.set("site", f"no watcher has taken {folder} yet")
        if not said:
            log.info("waiting for the watcher", dump_dir=str(folder))
            said = True
        service.stop.wait(0.2)
    return None


def _leave_with_site(service: Service, folder: Path, site: str) -> threading.Event:
    """Stop this process when the folder begins another life: its queue would be evicted, and this one starve."""
    moved = threading.Event()

    def look() -> None:
        while not service.stop.wait(_LOOK_SECONDS):
            try:
                found = read_site(folder)
            except (OSError, Unreadable) as error:
                log.warning("the folder's site cannot be read", error=str(error))
                continue
            if found not in (site, None):
                moved.set()
                service.stop.set()
                os.kill(os.getpid(), signal.SIGTERM)  # breaks off the wait for a job
                return

    threading.Thread(target=look, name="site", daemon=True).start()
    return moved


def _work(service: Service, bus: Bus, site: str, writer: str, handler: Handler) -> None:
    """Work through RQ; a worker that gave up because Redis was away or took no writes is followed by another.

    Raises:
        UsageError: Redis refuses the password.
    """
    life, problem = 0, ""
    while not service.stop.is_set():
        life += 1
        try:
            with bus.guard():
                worker = bus.jobs.worker(site, f"{writer}-{life}", handler, service.stop)
                service.health.set("redis")
                worker.work(logging_level="WARNING")
            problem = ""
        except Unavailable as error:
            if str(error) != problem:
                log.warning("no storage for now", error=str(error))
            problem = str(error)
        if not service.stop.is_set():
            service.health.set("redis", problem or "reconnecting")
            time.sleep(_RETRY_SECONDS)

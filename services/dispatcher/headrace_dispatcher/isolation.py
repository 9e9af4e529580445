"""The fault of one run, in its files or its spec, is that run's alone; the others go on."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from headrace import logs
from headrace.bus import Bus
from headrace.bus.values import RunView
from headrace.errors import HeadraceError, RedisAway, Unavailable

log = logs.get(__name__)


class Isolation:
    """Keeps the fault of one run from the others."""

    def __init__(self, bus: Bus) -> None:
        """Say what is wrong with runs of this bus."""
        self._bus = bus
        self._unreadable: dict[str, str] = {}

    def views(self) -> Iterator[RunView]:
        """Every run that this version can read; another one is named in the log, once for each problem."""
        for name in self._bus.runs.names():
            try:
                view = self._bus.runs.get(name)
            except RedisAway:
                raise
            except HeadraceError as error:
                if self._unreadable.get(name) != str(error):
                    self._unreadable[name] = str(error)
                    log.error("run unreadable", run=name, error=str(error))
                continue
            if view is not None:
                yield view

    @contextmanager
    def isolated(self, view: RunView) -> Iterator[None]:
        """Work on one run. One whose files are out of reach waits for them; any other fault pauses it with the reason.

        Raises:
            RedisAway: which is no run's fault.
        """
        run = view.spec.run
        try:
            yield
        except RedisAway:
            raise
        except Unavailable as error:
            if self.say_waiting(view, str(error)):
                log.warning("run waits for its files", run=run, error=str(error))
        except HeadraceError as error:
            log.error("run paused: it cannot go on", run=run, error=str(error))
            self._bus.runs.pause(run, str(error))

    def say_waiting(self, view: RunView, what: str) -> bool:
        """Say what a run waits for, empty for nothing, unless Redis says it already. Returns whether it was news."""
        if view.waiting_for == what:
            return False
        self._bus.runs.say_waiting(view.spec.run, what)
        return True

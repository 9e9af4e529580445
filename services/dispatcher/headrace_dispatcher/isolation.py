"""A run whose files or spec cannot be read is paused with the reason; the others go on."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from headrace import logs
from headrace.bus import Bus
from headrace.bus.values import RunView
from headrace.errors import HeadraceError, Unavailable

log = logs.get(__name__)


class Isolation:
    """Keeps the fault of one run from the others."""

    def __init__(self, bus: Bus) -> None:
        """Pause runs of this bus."""
        self._bus = bus
        self._unreadable: dict[str, str] = {}

    def views(self) -> Iterator[RunView]:
        """Every run that this version can read; another one is named in the log, once for each problem."""
        for name in self._bus.runs.names():
            try:
                view = self._bus.runs.get(name)
            except Unavailable:
                raise
            except HeadraceError as error:
                if self._unreadable.get(name) != str(error):
                    self._unreadable[name] = str(error)
                    log.error("run unreadable", run=name, error=str(error))
                continue
            if view is not None:
                yield view

    @contextmanager
    def isolated(self, run: str) -> Iterator[None]:
        """Work on one run.

        Raises:
            Unavailable: Redis is away, which is no run's fault.
        """
        try:
            yield
        except Unavailable:
            raise
        except HeadraceError as error:
            log.error("run paused: it cannot go on", run=run, error=str(error))
            self._bus.runs.pause(run, str(error))

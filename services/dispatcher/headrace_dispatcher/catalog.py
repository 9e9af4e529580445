"""The normalised samples of the runs that the dispatcher serves, and what a lost Redis is rebuilt from."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from headrace import logs, metrics
from headrace.bus import Bus
from headrace.bus.values import RunView
from headrace.errors import Conflict, HeadraceError, Unavailable
from headrace.runs import RunSpec
from headrace_dispatcher.inputs import Inputs

log = logs.get(__name__)


@dataclass(slots=True)
class _Opened:
    inputs: Inputs
    users: int = 0
    unwanted: bool = False


class Catalog:
    """Opens each run's inputs once, and closes them when nobody reads them any more. Thread-safe."""

    def __init__(self) -> None:
        """Start empty."""
        self._lock = threading.Lock()
        self._opened: dict[str, _Opened] = {}
        self._served: dict[str, RunView] = {}

    @contextmanager
    def reading(self, bus: Bus, spec: RunSpec) -> Iterator[Inputs | None]:
        """The run's samples, open until the block ends; None, with the reason in the run's `waiting_for`."""
        with self._lock:
            entry = self._enter(bus, spec)
        try:
            yield entry.inputs if entry is not None else None
        finally:
            if entry is not None:
                with self._lock:
                    entry.users -= 1
                    _close_unused(entry)

    def serve(self, view: RunView) -> None:
        """Remember a run that goes on, as it is now."""
        with self._lock:
            self._served[view.spec.run] = view

    def served(self) -> list[RunView]:
        """The runs that go on, as they were last seen."""
        with self._lock:
            return list(self._served.values())

    def forget(self, run: str) -> None:
        """Let go of a run that ended."""
        with self._lock:
            self._served.pop(run, None)
            self._drop(run)

    def close(self) -> None:
        """Let go of every run."""
        with self._lock:
            for run in list(self._opened):
                self._drop(run)

    def _enter(self, bus: Bus, spec: RunSpec) -> _Opened | None:
        known = self._opened.get(spec.run)
        if known is not None and known.inputs.spec.digest != spec.digest:
            self._drop(spec.run)
            known = None
        if known is None:
            try:
                known = self._opened[spec.run] = _Opened(_open(spec))
            except HeadraceError as error:
                bus.runs.say_waiting(spec.run, str(error))
                log.warning("inputs unreadable", run=spec.run, error=str(error))
                return None
            metrics.see_run(spec.run)
        known.users += 1
        return known

    def _drop(self, run: str) -> None:
        entry = self._opened.pop(run, None)
        if entry is not None:
            entry.unwanted = True
            _close_unused(entry)


def _open(spec: RunSpec) -> Inputs:
    try:
        inputs = Inputs.open(Path(spec.output))
    except OSError as error:
        raise Unavailable(f"{spec.output}: {error}") from error
    if inputs.spec.digest != spec.digest:
        inputs.close()
        raise Conflict(f"{spec.output}/inputs holds another run's samples; submit the run again")
    return inputs


def _close_unused(entry: _Opened) -> None:
    if entry.unwanted and entry.users == 0:
        entry.inputs.close()

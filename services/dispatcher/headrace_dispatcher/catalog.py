"""The normalised samples of the runs that the dispatcher serves, opened once each."""

from __future__ import annotations

import threading
from pathlib import Path

from headrace import logs, metrics
from headrace.bus import Bus
from headrace.errors import Conflict, HeadraceError
from headrace.runs import RunSpec
from headrace_dispatcher.inputs import Inputs

log = logs.get(__name__)


class Catalog:
    """Opens inputs by run, and remembers the specs so that a Redis that lost them can be rebuilt. Thread-safe."""

    def __init__(self) -> None:
        """Start empty."""
        self._lock = threading.Lock()
        self._inputs: dict[str, Inputs] = {}
        self.specs: dict[str, RunSpec] = {}

    def inputs(self, bus: Bus, spec: RunSpec) -> Inputs | None:
        """The run's samples; None, with the reason in the run's `waiting_for`, when they cannot be read here."""
        with self._lock:
            self.specs[spec.run] = spec
            known = self._inputs.get(spec.run)
            if known is not None and known.spec.digest == spec.digest:
                return known
            try:
                opened = Inputs.open(Path(spec.output))
                if opened.spec.digest != spec.digest:
                    opened.close()
                    raise Conflict(f"{spec.output}/inputs holds another run's samples; submit the run again")
            except HeadraceError as error:
                bus.runs.say_waiting(spec.run, str(error))
                log.warning("inputs unreadable", run=spec.run, error=str(error))
                return None
            if known is not None:
                known.close()
            self._inputs[spec.run] = opened
            metrics.see_run(spec.run)
            return opened

    def forget(self, run: str) -> None:
        """Close a run that ended."""
        with self._lock:
            known = self._inputs.pop(run, None)
            self.specs.pop(run, None)
        if known is not None:
            known.close()

    def close(self) -> None:
        """Close every run."""
        for run in list(self.specs):
            self.forget(run)

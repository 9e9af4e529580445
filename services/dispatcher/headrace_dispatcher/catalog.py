"""The normalised samples of the runs that the dispatcher serves, and what a lost Redis is rebuilt from."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from headrace import metrics
from headrace.bus.values import RunView
from headrace.errors import HeadraceError, Unavailable
from headrace.runs import RunSpec
from headrace_dispatcher.inputs import Inputs


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
    def reading(self, spec: RunSpec) -> Iterator[Inputs]:
        """The run's samples, open until the block ends.

        Raises:
            Unavailable: they cannot be opened now; the folder may be mounted, or the run submitted, later.
        """
        entry = self._take(spec) or self._add(spec, _open(spec))
        try:
            yield entry.inputs
        finally:
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

    def _take(self, spec: RunSpec) -> _Opened | None:
        """What is open already, unless it is another extraction's, or its folder was removed or replaced."""
        with self._lock:
            known = self._opened.get(spec.run)
            if known is None or known.inputs.spec.digest != spec.digest or not known.inputs.in_place():
                return None
            known.users += 1
            return known

    def _add(self, spec: RunSpec, inputs: Inputs) -> _Opened:
        """Keep what was opened just now, in place of what was there, which is closed once nobody reads it."""
        metrics.see_run(spec.run)
        with self._lock:
            self._drop(spec.run)
            entry = self._opened[spec.run] = _Opened(inputs, users=1)
            return entry

    def _drop(self, run: str) -> None:
        entry = self._opened.pop(run, None)
        if entry is not None:
            entry.unwanted = True
            _close_unused(entry)


def _open(spec: RunSpec) -> Inputs:
    try:
        inputs = Inputs.open(Path(spec.output))
    except HeadraceError as error:
        raise Unavailable(str(error)) from error
    if inputs.spec.digest != spec.digest:
        inputs.close()
        raise Unavailable(f"{spec.output}/inputs holds another run's samples; submit the run again")
    return inputs


def _close_unused(entry: _Opened) -> None:
    if entry.unwanted and entry.users == 0:
        entry.inputs.close()

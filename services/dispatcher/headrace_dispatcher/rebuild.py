"""Brings Redis up to what a run's folder says: after a submit, a Redis that was emptied, or one set back."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from headrace import logs
from headrace.bus import Bus
from headrace.errors import Conflict
from headrace.manifest import Damage, Line, ManifestReader, read_dataset
from headrace.runs import RunSpec

log = logs.get(__name__)


def rebuild(bus: Bus, spec: RunSpec) -> int:
    """Create the run if Redis does not know it, and mark every sample that has a manifest line.

    The manifest is ahead of Redis or level with it, never behind. Returns how many samples Redis learnt of.

    Raises:
        Conflict: Redis knows another extraction under this name.
    """
    if bus.runs.create(spec) == "other":
        known = bus.runs.spec(spec.run)
        differences = "; ".join(spec.differences(known)) if known else "it was removed just now"
        raise Conflict(f"run {spec.run!r} is another extraction in Redis ({differences}); choose another name")
    output = Path(spec.output)
    dataset = read_dataset(output)
    if dataset is not None:
        bus.runs.set_identity(spec.run, dataset.identity)
    # Stored lines first: a sample that failed once and was stored later is stored.
    learnt = bus.runs.mark_done(spec.run, (line for line in _lines(output) if line.status == "stored"))
    learnt += bus.runs.mark_done(spec.run, (line for line in _lines(output) if line.status != "stored"))
    view = bus.runs.get(spec.run)
    if view is not None and view.state == "rebuilding":
        bus.runs.activate(spec.run)
    return learnt


def _lines(output: Path) -> Iterator[Line]:
    for entry in ManifestReader(output).read_new():
        if isinstance(entry, Damage):
            log.warning("manifest line unreadable", segment=entry.segment, line=entry.number, problem=entry.problem)
        else:
            yield entry

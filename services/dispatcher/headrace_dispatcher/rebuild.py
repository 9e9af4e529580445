"""Brings Redis up to what a run's folder says: after a submit, a Redis that was emptied, or one set back."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from headrace import logs
from headrace.bus import Bus
from headrace.errors import Conflict, Unavailable
from headrace.manifest import Damage, Line, ManifestReader, read_dataset
from headrace.runs import RunSpec
from headrace_dispatcher.failures import Failures

log = logs.get(__name__)


def rebuild(bus: Bus, spec: RunSpec, *, same_folder: bool = False) -> int:
    """Create the run if Redis does not know it, and mark every sample that has a manifest line.

    The manifest is ahead of Redis or level with it, never behind: a folder that is behind was emptied, or is another
    one than before. `same_folder`: the spec is what Redis said, so that it cannot be; a shared filesystem may only
    show lines late. Returns how many samples Redis learnt of.

    Raises:
        Conflict: Redis knows another extraction under this name, or more lines of this one than its folder has.
        Unreadable: `headrace.json` is damaged, or of a newer schema.
        Unavailable: the folder cannot be read now.
    """
    try:
        if not same_folder:
            _refuse_another_folder(bus, spec)
        outcome = bus.runs.create(spec)
        known = bus.runs.spec(spec.run) if outcome in ("other", "moved") else None
        if outcome == "moved":
            before = known.output if known else "another folder"
            raise Conflict(
                f"run {spec.run!r} goes on into {before}: cancel it (headrace cancel {spec.run}) and wait until its "
                f"captured dumps are stored, before its output becomes {spec.output}"
            )
        if outcome == "other":
            differences = "; ".join(spec.differences(known)) if known else "it was removed just now"
            raise Conflict(f"run {spec.run!r} is another extraction in Redis ({differences}); choose another name")
        return _learn(bus, spec)
    except OSError as error:
        raise _unreadable(spec, error) from error


def retry_failed(bus: Bus, spec: RunSpec) -> Counter[str]:
    """Have the samples of a run extracted again that failed; it was rebuilt just now, so that Redis knows them all.

    Returns how many they are, by the reason that they failed for last, with those that are tried again already.
    """
    return Counter(bus.runs.reopen(spec.run, bus.runs.failed(spec.run)).values())


def _refuse_another_folder(bus: Bus, spec: RunSpec) -> None:
    """A run may go on in a folder that was moved, and not in an empty one: its rows would be in two places."""
    known = bus.runs.get(spec.run)
    if known is None or known.spec.digest != spec.digest:
        return
    there = known.spec.total - known.open
    seen = bytearray(spec.total)
    for line in _lines(Path(spec.output)):
        if 0 <= line.ordinal < spec.total:
            seen[line.ordinal] = 1
    here = sum(seen)
    if there > here:
        raise Conflict(
            f"run {spec.run!r} has lines of {there} samples in {known.spec.output}, but {spec.output} has those of "
            f"{here}: give the first as its output, move or restore its content, or choose another name"
        )


def _learn(bus: Bus, spec: RunSpec) -> int:
    output = Path(spec.output)
    dataset = read_dataset(output)
    if dataset is not None:
        bus.runs.set_identity(spec.run, dataset.identity)
    # Stored lines first: a sample that failed once and was stored later is stored.
    failures = Failures(spec.total)
    learnt = bus.runs.mark_done(spec.run, (line for line in failures.noting(_lines(output)) if line.status == "stored"))
    learnt += bus.runs.mark_done(spec.run, (line for line in _lines(output) if line.status == "rejected"))
    failed = failures.standing()
    learnt += bus.runs.mark_done(spec.run, failed)
    bus.runs.note_failed(spec.run, failed)
    view = bus.runs.get(spec.run)
    if view is not None and view.state == "rebuilding":
        bus.runs.activate(spec.run)
    return learnt


def _unreadable(spec: RunSpec, error: OSError) -> Unavailable:
    return Unavailable(f"{spec.output}: {error}; make it readable")


def _lines(output: Path) -> Iterator[Line]:
    for entry in ManifestReader(output).read_new():
        if isinstance(entry, Damage):
            log.warning("manifest line unreadable", segment=entry.segment, line=entry.number, problem=entry.problem)
        else:
            yield entry

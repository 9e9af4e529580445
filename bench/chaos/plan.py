"""A fault plan for the engine: every kind of wrong dump and answer that a verdict can see, in a few samples each."""

from __future__ import annotations

import random
from pathlib import Path

from headrace_engine.faults.plan import Kind
from tests.support.faults import Fault, write_plan

FEWEST = 100  # samples, of which some are hit by each kind
# The first two lead to rows that are wrong and that nothing can tell from right ones; the others are the schedule's.
LEFT_OUT = frozenset({Kind.OTHER_STATES, Kind.SWAPPED_BOUNDARIES, Kind.HANG, Kind.CRASH})
_SECONDS = {Kind.LATE: 3.0, Kind.SLOW: 1.0}
_PART = 0.002  # of the samples, for each kind
# A run is of the engine and weights of its first captured dump: no fault in the samples that it may be.
_SPARED_PART = 0.2


def write(path: Path, seed: int, samples: int) -> dict[str, int]:
    """Write the plan; returns how many samples each kind hits, once each. There must be `FEWEST` or more."""
    rng = random.Random(seed)
    kinds = [kind for kind in Kind if kind not in LEFT_OUT]
    each = max(1, round(_PART * samples))
    ordinals = rng.sample(range(round(_SPARED_PART * samples), samples), each * len(kinds))
    faults: list[Fault] = []
    for index, kind in enumerate(kinds):
        fault: dict[str, str | int | float | list[int]] = {
            "kind": kind.value,
            "ordinals": sorted(ordinals[index * each : (index + 1) * each]),
        }
        if kind in _SECONDS:
            fault["seconds"] = _SECONDS[kind]
        faults.append(fault)
    write_plan(path, *faults, seed=seed)
    return {kind.value: each for kind in kinds}

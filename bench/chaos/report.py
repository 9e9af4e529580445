"""The tables that a run ends with, and their data."""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from rich.table import Table

from bench.chaos.checks import Check
from bench.chaos.driving import Course, Strike
from headrace_cli import console


def data_of(
    seed: int, samples: int, course: Course, engine_faults: Mapping[str, int], checks: Sequence[Check]
) -> dict[str, Any]:
    """Everything that the tables show, as JSON has it."""
    return {
        "seed": seed,
        "samples": samples,
        "seconds": round(course.seconds, 1),
        "faults": len(course.strikes),
        "faults_by_kind": _by_kind(course),
        "engine_faults": dict(engine_faults),
        "burnt_attempts": dict(course.burnt_by_reason),
        "submitted_again": course.resubmitted,
        "checks": {check.what: check.found for check in checks},
        "examples": {check.what: list(check.examples) for check in checks if check.found},
    }


def show(data: dict[str, Any]) -> None:
    """Print the tables."""
    faults = Table(
        "fault",
        "process",
        "times",
        "away",
        "median",
        "p90",
        "max",
        "not seen",
        title="seconds away (median), and from the return to a process that is ready and a row after that;\n"
        "not seen where it was struck again, or all was stored, first",
    )
    for entry in data["faults_by_kind"]:
        figures = [f"{entry[name]:.1f}" if entry[name] is not None else "" for name in ("away", "median", "p90", "max")]
        faults.add_row(entry["kind"], entry["process"], str(entry["times"]), *figures, str(entry["not_seen"]))
    console.out.print(faults)
    must = Table("must be zero", "found", title=f"seed {data['seed']}, {data['samples']} samples")
    for what, found in data["checks"].items():
        must.add_row(what, str(found))
    console.out.print(must)
    for what, examples in data["examples"].items():
        console.out.print(f"{what}:", *examples, sep="\n  ")
    console.out.print(f"{data['faults']} faults within {data['seconds']:.0f} s")
    console.out.print(f"faults of the engine: {_listed(data['engine_faults'])}")
    console.out.print(f"attempts burnt: {_listed(data['burnt_attempts'])}")
    console.out.print(f"submitted again: {data['submitted_again']}")


def _listed(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {count}" for name, count in sorted(counts.items())) or "none"


def _by_kind(course: Course) -> list[dict[str, Any]]:
    """Faults by kind and process; the second process of a pair counts as the first."""
    groups = defaultdict[tuple[str, str], list[Strike]](list)
    for strike in course.strikes:
        process = strike.fault.process.partition("-")[0]
        groups[process, strike.fault.kind].append(strike)
    entries = []
    for (process, kind), strikes in sorted(groups.items()):
        known = sorted(strike.to_recover for strike in strikes if strike.to_recover is not None)
        entries.append(
            {
                "kind": kind,
                "process": process,
                "times": len(strikes),
                "away": statistics.median(strike.away for strike in strikes),
                "median": statistics.median(known) if known else None,
                "p90": known[math.ceil(0.9 * len(known)) - 1] if known else None,
                "max": known[-1] if known else None,
                "not_seen": len(strikes) - len(known),
            }
        )
    return entries

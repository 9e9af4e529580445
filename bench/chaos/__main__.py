"""`python -m bench.chaos`: exits 0, 1 when anything is lost, wrong or left behind, 2 for bad arguments.

Run from the repository's root. What is struck are the real processes over a tiny random model.
"""

from __future__ import annotations

import argparse
import json
import shutil
import signal
import sys
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.chaos import checks, plan, report, schedule
from bench.chaos.driving import Course, Driver
from bench.chaos.fleet import Fleet
from bench.options import result_file
from headrace.errors import HeadraceError
from tests.support.faults import hits_of
from tests.support.pipeline import QUICK, submit, write_run_file, write_samples
from tests.support.tiny_models import tiny_llama

RUN = "chaos"
_PLAN = "plan.toml"
_LONGEST_PROMPT = 160
_CHUNK_TOKENS = "8"  # a prompt takes many steps, so that faults come in the middle of it, and not too many rows at once
_ENVIRON = {
    "HEADRACE_MISMATCH_LIMIT": "1",  # the plan's mismatches must not pause the run
    "HEADRACE_DUMP_CAP_BYTES": "3000000",  # some 35 dumps, so that no more rows than these come without an engine
}
_MAX_ATTEMPTS = 1000  # a kill may burn an attempt, and no sample may fail of that
_LEASES = ("IN_FLIGHT", "GRACE", "CAPTURED", "STORING")
_TAIL_LINES = 5


def main(arguments: Sequence[str]) -> int:
    """Run, print the tables, and return the exit code."""
    options = _parse(arguments)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C: every process is stopped
    checks.use_one_thread()
    folder = Path(tempfile.mkdtemp(prefix="headrace-chaos-"))
    fleet: Fleet | None = None
    keep = True  # for a look, unless all is well or somebody does not want to wait
    try:
        model = tiny_llama(folder / "model")
        planned = plan.write(folder / _PLAN, options.seed, options.samples) if options.plan else {}
        flags = ("--faults", str(folder / _PLAN)) if planned else ()
        fleet = Fleet(folder, model, ("--chunk-tokens", _CHUNK_TOKENS, *flags), _ENVIRON)
        data = run(fleet, folder, model, planned, options)
        report.show(data)
        if options.json is not None:
            options.json.write_text(json.dumps(data, indent=2) + "\n")
        keep = any(data["checks"].values())
    except KeyboardInterrupt:
        keep = False
        raise
    except (HeadraceError, AssertionError) as error:
        print(f"chaos: {error}", file=sys.stderr)
    finally:
        if not keep:
            shutil.rmtree(folder, ignore_errors=True)
        elif fleet is not None:
            _show_tails(fleet)
            print(f"kept for a look: {folder}", file=sys.stderr)
    return int(keep)


def run(
    fleet: Fleet, folder: Path, model: Path, planned: Mapping[str, int], options: argparse.Namespace
) -> dict[str, Any]:
    """Start everything, strike it, stop it, and look at what came of it.

    Raises:
        HeadraceError, AssertionError: a process cannot be started, or Redis does not answer at the end.
    """
    samples = write_samples(folder / "samples.jsonl", options.samples, longest=_LONGEST_PROMPT, seed=options.seed)
    run_file = write_run_file(folder, samples, model, name=RUN, max_attempts=_MAX_ATTEMPTS)
    output = folder / "dataset"
    leases = [float(QUICK[f"HEADRACE_LEASE_{name}_SECONDS"]) for name in _LEASES]
    faults = schedule.draw(options.seed, options.faults, min(leases), max(leases))
    with fleet:
        bus = fleet.start_all()
        submit(bus, run_file)
        driver = Driver(fleet, bus, RUN, options.samples, output, faults, lambda: submit(bus, run_file))
        course = driver.drive(options.seconds or _limit(options))
        fleet.wait_ready()
        found = [*_of_course(course), *checks.settled(bus, RUN, fleet.main.dump_dir)]
        found += checks.in_redis(bus, RUN, output, course.broken_off)
        driver.note_burnt()
        bus.close()
        codes = fleet.stop()
    found.append(checks.check("processes that did not end well", [f"{n}: {c}" for n, c in codes.items() if c]))
    found += [*checks.in_folder(output, options.samples), checks.verified(output)]
    found.append(checks.recomputed(output, samples, model))
    made = Counter(str(hit["kind"]) for hit in hits_of(folder / _PLAN))
    missing = [f"{kind}: {made[kind]} of {count}" for kind, count in planned.items() if made[kind] < count]
    found.append(checks.check("faults of the engine not made", missing))
    return report.data_of(options.seed, options.samples, course, made, found)


def _of_course(course: Course) -> list[checks.Check]:
    return [
        checks.check("runs that took too long", [] if course.finished else [f"stopped after {course.seconds:.0f} s"]),
        checks.Check(what="faults not made", found=course.unmade),
        checks.check("processes that ended by themselves", course.ended),
    ]


def _limit(options: argparse.Namespace) -> float:
    return 60.0 + 10.0 * float(options.faults) + 0.1 * float(options.samples)


def _show_tails(fleet: Fleet) -> None:
    for name in fleet.names:
        print(f"--- {name}\n{fleet.tail(name, _TAIL_LINES)}", file=sys.stderr)


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.chaos", description=__doc__)
    parser.add_argument("--seed", type=int, default=1, help="of the faults and the samples")
    parser.add_argument("--samples", type=int, default=300)
    parser.add_argument("--faults", type=int, default=20, help=f"{schedule.FEWEST} or more, and no more than samples")
    parser.add_argument(
        "--plan",
        action=argparse.BooleanOptionalAction,
        default=True,
        help=f"have the engine go wrong as well, in some of {plan.FEWEST} samples or more",
    )
    parser.add_argument("--seconds", type=float, default=0.0, help="the longest time for the run; 0 follows the rest")
    parser.add_argument("--json", type=result_file, help="a file for the tables' data")
    options = parser.parse_args(arguments)
    if not schedule.FEWEST <= options.faults <= options.samples:
        parser.error(f"give {schedule.FEWEST} faults or more, and at least as many samples")
    if options.plan and options.samples < plan.FEWEST:
        parser.error(f"give {plan.FEWEST} samples or more, or --no-plan")
    if not 0 <= options.seconds < float("inf"):
        parser.error("--seconds must be 0 or more")
    return options


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except KeyboardInterrupt:
        sys.exit(130)

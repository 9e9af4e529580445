"""What must hold when the run is over: looked up in the folder, in Redis and in the dump folder, and recomputed."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Iterable, Set
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from headrace.bus import Bus
from headrace.bus import keys as bus_keys
from headrace.bus.values import RunView
from headrace.manifest import Damage, Line, ManifestReader
from headrace_cli.verify import verify
from tests.support.oracle import Oracle, agree
from tests.support.pipeline import dumps_in

BOUNDARIES = (2, 4, 5)
_TENSORS = ("token_ids", "loss_mask", "aux", "final")
_EXAMPLES = 5

# The keys that a finished run and a live fleet have, whether each must have a TTL, and why it is there.
NAMED: dict[str, tuple[bool, str]] = {
    "hr:runs": (False, "index of runs"),
    "hr:sites": (False, "index of sites"),
    "hr:run:{run}": (True, "the finished run's books, for 30 days"),
    "hr:run:{run}:done": (True, "as its run"),
    "hr:run:{run}:dead": (True, "as its run"),
    "hr:req:*": (True, "an attempt that ended; its dump may still come"),
    "hr:site:{site}": (True, "the registration, a heartbeat"),
    "hr:dispatcher:*": (True, "a dispatcher lives"),
    "rq:queues": (False, "RQ's index of queues"),
    "rq:workers": (False, "RQ's index of workers"),
    "rq:workers:store-{site}": (True, "RQ's index of the queue's workers"),
    "rq:worker:*": (True, "a worker lives"),
    "rq:clean_registries:*": (True, "RQ's lock of its maintenance"),
    "rq:clean_groups": (True, "RQ's lock of its maintenance"),
    "rq:job:*": (True, "a job that raised or whose worker was killed, for ten minutes"),
    "rq:execution:*": (True, "what a worker that was killed was doing, for an hour"),
    "rq:executions:*": (True, "as its execution"),
    "rq:results:*": (True, "what a job raised, as its job"),
    "rq:queue:*:first_seen:*": (True, "when RQ's maintenance first saw a job that a killed worker had taken"),
    "rq:queue:store-{site}:intermediate": (False, "jobs that a worker took when it was killed; counted on their own"),
    "rq:wip:store-{site}": (False, "jobs of workers that were killed; counted on their own"),
    "rq:failed:store-{site}": (False, "jobs that raised; counted on their own"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """Something of which nothing may be found."""

    what: str
    found: int
    examples: tuple[str, ...] = ()


def check(what: str, found: Iterable[object]) -> Check:
    """A check over a list of findings."""
    every = [str(one) for one in found]
    return Check(what=what, found=len(every), examples=tuple(every[:_EXAMPLES]))


def settled(bus: Bus, run: str, dump_dir: Path, seconds: float = 60.0) -> list[Check]:
    """Wait until nothing is in flight, held or queued any more, for so long at most, and tell what is left."""
    until = time.monotonic() + seconds
    while True:
        left = _held(bus, run, dump_dir)
        if not any(one.found for one in left) or time.monotonic() > until:
            return left
        time.sleep(0.2)


def _held(bus: Bus, run: str, dump_dir: Path) -> list[Check]:
    client = bus.redis
    leases, credits, jobs = list[object](), list[object](), list[object]()
    leases += [*client.zrange(bus_keys.in_flight(run), 0, -1), *client.zrange(bus_keys.recording(run), 0, -1)]
    for site in bus.sites.names():
        credits += client.hkeys(bus_keys.credits(site))
        leases += client.zrange(bus_keys.captured(site), 0, -1)
        leases += client.zrange(bus_keys.storing(site), 0, -1)
        jobs += bus.jobs.queued(site)
    view = bus.runs.get(run)
    return [
        check("runs not finished", [] if view is not None and view.state == "finished" else [run]),
        check("credits", credits),
        check("leases", leases),
        check("storage jobs queued", jobs),
        check("samples fed and not done", [*client.hkeys(bus_keys.opened(run))]),
        check("dumps and unfinished files", dumps_in(dump_dir)),
        Check(what="bytes of dumps", found=sum((dump_dir / name).stat().st_size for name in dumps_in(dump_dir))),
    ]


def in_redis(bus: Bus, run: str, output: Path, broken_off: int) -> list[Check]:
    """Books that agree with the manifest's, no key beyond the named ones, no more jobs in RQ than were broken off."""
    view = bus.runs.get(run)
    if view is None:
        return [check("runs that Redis lost", [run])]
    noted = {name for site in bus.sites.names() for name in bus.jobs.noted(site)}
    return [
        check("counts that differ between Redis and the manifest", _differences(view, output)),
        Check(what="samples failed", found=view.failed),
        Check(what="samples rejected", found=view.rejected),
        Check(what="samples open", found=view.open),
        check("jobs that RQ keeps beyond those broken off", sorted(noted)[broken_off:]),
        check("Redis keys beyond the named", _unnamed(bus, run, noted)),
    ]


def _differences(view: RunView, output: Path) -> Iterable[str]:
    lines = {line.ordinal: line for line in ManifestReader(output).read_new() if isinstance(line, Line)}
    found = Counter[str](line.status for line in lines.values())
    pairs = {
        "stored": (view.stored, found["stored"]),
        "rejected": (view.rejected, found["rejected"]),
        "failed": (view.failed, found["failed"]),
        "tokens": (view.tokens, sum(line.tokens for line in lines.values() if line.status == "stored")),
        "bytes": (view.bytes, sum(line.bytes for line in lines.values())),
        "total": (view.spec.total, view.stored + view.rejected + view.failed + view.open),
    }
    return [f"{name}: Redis {here}, manifest {there}" for name, (here, there) in pairs.items() if here != there]


def _unnamed(bus: Bus, run: str, noted: Set[str]) -> Iterable[str]:
    """Keys that are not in the table or lack their TTL; a job has none until RQ sees that its worker was killed."""
    sites = bus.sites.names()
    table = {pattern.format(run=run, site=site): lasting for pattern, (lasting, _) in NAMED.items() for site in sites}
    left = []
    for raw in bus.redis.scan_iter("*"):
        name, ttl = raw.decode(), bus.redis.ttl(raw)
        if ttl == -2 or name.removeprefix("rq:job:") in noted:
            continue
        needs_ttl = next((needs for pattern, needs in table.items() if fnmatchcase(name, pattern)), None)
        if needs_ttl is None:
            left.append(name)
        elif needs_ttl and ttl == -1:
            left.append(f"{name} without a TTL")
    return left


def in_folder(output: Path, total: int) -> list[Check]:
    """Exactly one row and one stored line for each sample, and nothing else; no process has the folder open."""
    damaged, stored, paths = [], Counter[int](), set[str]()
    for line in ManifestReader(output).read_new():
        if isinstance(line, Damage):
            damaged.append(f"{line.segment}:{line.number}: {line.problem}")
        elif line.status == "stored":
            stored[line.ordinal] += 1
            paths.add(line.path)
    rows = {str(path.relative_to(output)) for path in (output / "rows").rglob("*") if path.is_file()}
    temporary = [path for path in (output / ".tmp").rglob("*") if path != output / ".tmp" / "lock"]
    return [
        check("samples lost: without a stored line", [n for n in range(total) if not stored[n]]),
        check("samples lost: with a line and without its row", sorted(paths - rows)),
        check("samples duplicated: with another stored line", [n for n, lines in stored.items() if lines > 1]),
        check("samples duplicated: rows without a line", sorted(rows - paths)),
        check("damaged lines", damaged),
        check("temporary files", temporary),
        check("rows put away as wrong", (output / ".quarantine").glob("*")),
    ]


def verified(output: Path) -> Check:
    """What `headrace verify` finds wrong in books and rows; the states are for `recomputed`."""
    report = verify(output, model=None, sample=0, all_rows=False, semantic=False, tolerance=None, progress=None)
    problems = [f"{problem.where}: {problem.kind}: {problem.detail}" for problem in report.problems]
    return Check(
        what="problems that verify names", found=sum(report.counts.values()), examples=tuple(problems[:_EXAMPLES])
    )


def recomputed(output: Path, data: Path, model: Path) -> Check:
    """Rows whose ids, mask or states are not those of the sample in a plain transformers forward."""
    oracle = Oracle(model, BOUNDARIES)
    samples = [json.loads(line) for line in data.read_text().splitlines()]
    wrong = []
    for path in sorted((output / "rows").rglob("*.safetensors")):
        try:
            sample = samples[int(path.stem)]
            with safe_open(path, framework="pt") as file:
                row = {name: file.get_tensor(name) for name in _TENSORS}
            states = oracle.states(sample["input_ids"])
            right = (
                row["token_ids"].tolist() == sample["input_ids"]
                and row["loss_mask"].tolist() == sample["loss_mask"]
                and all(agree(row[name], wanted) for name, wanted in states.items())
            )
        except (SafetensorError, KeyError, IndexError, ValueError) as error:
            wrong.append(f"{path.name}: {error}")
        else:
            if not right:
                wrong.append(path.name)
    return check("rows wrong", wrong)


def use_one_thread() -> None:
    """Short prompts are computed faster by one thread than by two that wait for each other."""
    torch.set_num_threads(1)

"""A whole pipeline over a tiny random model: processes, samples, a run, and an oracle."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.request import urlopen

from prometheus_client.parser import text_string_to_metric_families

from headrace.bus import Bus
from headrace.bus import keys as bus_keys
from headrace.bus.values import RunView
from headrace.manifest import INPUTS_FOLDER, Line, ManifestReader
from headrace_cli.stack import SERVICES, Stack, StackConfig
from headrace_cli.submit import submit_run
from tests.support.waiting import wait_until

MODEL_NAME = "tiny"
READY_SECONDS = 90.0

# Short leases, so that a killed process is missed soon; the order of size is that of the defaults.
QUICK = {
    "HEADRACE_LEASE_IN_FLIGHT_SECONDS": "4",
    "HEADRACE_LEASE_GRACE_SECONDS": "4",
    "HEADRACE_LEASE_CAPTURED_SECONDS": "6",
    "HEADRACE_LEASE_STORING_SECONDS": "5",
    "HEADRACE_LEASE_RECORD_SECONDS": "5",
    "HEADRACE_HEARTBEAT_SECONDS": "1",
    "HEADRACE_SITE_TTL_SECONDS": "4",
    "HEADRACE_ORPHAN_GRACE_SECONDS": "4",
    "HEADRACE_CANARY_TIMEOUT_SECONDS": "15",
    "HEADRACE_MAX_REQUESTS": "16",
    "HEADRACE_REAP_SECONDS": "0.5",
    "HEADRACE_DRAIN_SECONDS": "5",
}


def make_stack(
    folder: Path, model: Path, *, engine: tuple[str, ...] = (), environ: Mapping[str, str] | None = None
) -> Stack:
    """A stack that nobody has started; see `stack_config`."""
    return Stack(stack_config(folder, model, engine=engine, environ=environ))


def stack_config(
    folder: Path, model: Path, *, engine: tuple[str, ...] = (), environ: Mapping[str, str] | None = None
) -> StackConfig:
    """Quick leases and a small step budget, so that prompts are split; `environ` wins."""
    flags = ("--chunk-tokens", "128", "--threads", "1", *engine)
    return StackConfig(
        folder=folder, model=model, model_name=MODEL_NAME, engine=flags, environ={**QUICK, **(environ or {})}
    )


@contextmanager
def running(stack: Stack) -> Iterator[Bus]:
    """Start every service, wait until all are ready, and stop them at the end."""
    with stack:
        stack.start("redis")
        stack.wait_ready("redis", READY_SECONDS)
        for name in SERVICES[1:]:
            stack.start(name)
        for name in SERVICES[1:]:
            stack.wait_ready(name, READY_SECONDS)
        bus = stack.bus()
        try:
            yield bus
        finally:
            bus.close()


def write_samples(
    path: Path, count: int, *, shortest: int = 4, longest: int = 300, seed: int = 1, vocab: int = 400
) -> Path:
    """Random samples as ready token ids; every third one shares a long prefix with the others."""
    rng = random.Random(seed)
    shared = [rng.randrange(3, vocab) for _ in range(longest // 2)]
    lines = []
    for ordinal in range(count):
        ids = [rng.randrange(3, vocab) for _ in range(rng.randint(shortest, longest))]
        if ordinal % 3 == 0:
            ids = (shared + ids)[:longest]
        mask = [0] * (len(ids) // 2) + [1] * (len(ids) - len(ids) // 2)
        lines.append(json.dumps({"id": f"s{ordinal}", "input_ids": ids, "loss_mask": mask}))
    path.write_text("\n".join(lines) + "\n")
    return path


def write_run_file(folder: Path, data: Path, model: Path, *, name: str = "test", **changes: str | int) -> Path:
    """A run file for the tiny model; `changes` are further keys."""
    table: dict[str, object] = {
        "name": name,
        "data": str(data),
        "output": str(folder / "dataset"),
        "model": str(model),
        "engine_model": MODEL_NAME,
        "max_attempts": 10,
        **changes,
    }
    path = folder / f"{name}.toml"
    path.write_text("[run]\n" + "\n".join(f"{key} = {json.dumps(value)}" for key, value in table.items()) + "\n")
    return path


def submit(bus: Bus, run_file: Path) -> RunView:
    """Submit, as the command does."""
    return submit_run(bus, run_file, start=0, end=None, limit=None, engine_check=True)


def wait_stored(bus: Bus, run: str, at_least: int, timeout: float = 120.0) -> RunView:
    """Wait until so many rows are stored."""

    def enough() -> RunView | None:
        view = bus.runs.get(run)
        assert view is not None
        return view if view.stored >= at_least else None

    return wait_until(enough, timeout, f"{at_least} rows of {run}")


def wait_reason(bus: Bus, run: str, reason: str, count: int, timeout: float = 60.0) -> RunView:
    """Wait until so many attempts ended for this reason."""

    def enough() -> RunView | None:
        view = bus.runs.get(run)
        return view if view is not None and view.reasons.get(reason, 0) >= count else None

    return wait_until(enough, timeout, f"{count} attempts of {run} to end as {reason}")


def wait_finished(bus: Bus, run: str, timeout: float = 180.0) -> RunView:
    """Wait until the run is finished."""

    def finished() -> RunView | None:
        view = bus.runs.get(run)
        assert view is not None
        return view if view.state == "finished" else None

    return wait_until(finished, timeout, f"run {run} to finish")


def lines_of(output: Path) -> list[Line]:
    """All lines of a manifest; a damaged one fails the test."""
    lines = list(ManifestReader(output).read_new())
    assert all(isinstance(line, Line) for line in lines), lines
    return [line for line in lines if isinstance(line, Line)]


def assert_right(view: RunView, output: Path, model: Path) -> None:
    """Every sample has exactly one row, and a plain transformers forward gives the same states."""
    assert (view.stored, view.rejected, view.failed, view.open) == (view.spec.total, 0, 0, 0)
    rows = [path for path in (output / "rows").rglob("*") if path.is_file()]
    assert len(rows) == view.spec.total
    assert {line.ordinal for line in lines_of(output)} == set(range(view.spec.total))
    assert (output / INPUTS_FOLDER).is_dir()
    from headrace_cli.verify import verify

    report = verify(output, model=model, sample=0, all_rows=True, semantic=False, tolerance=None, progress=None)
    assert report.ok, report.problems[:5]


def assert_nothing_left(stack: Stack, bus: Bus, run: str) -> None:
    """Credits are zero, no lease is held, and the dump folder has no dump."""

    def clean() -> bool:
        sites = bus.sites.names()
        zero = all(
            bus.redis.hlen(bus_keys.credits(site)) == 0
            and bus.redis.zcard(bus_keys.captured(site)) == 0
            and bus.redis.zcard(bus_keys.storing(site)) == 0
            and bus.jobs.depth(site) == 0
            for site in sites
        )
        idle = not bus.redis.exists(bus_keys.in_flight(run), bus_keys.opened(run), bus_keys.pending(run))
        return zero and idle and not dumps_in(stack.dump_dir)

    wait_until(clean, 60.0, "credits, leases and the dump folder to be empty")


@contextmanager
def stopped(stack: Stack, name: str) -> Iterator[None]:
    """SIGSTOP a service for the block: it hangs, and its ports stay open."""
    pid = stack.pid(name)
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


def redis_log(stack: Stack) -> Path:
    """The folder of what the stack's Redis appended; a copy of it is what Redis knew then."""
    return stack.folder / "redis" / "appendonlydir"


def set_redis_back(stack: Stack, earlier: Path) -> None:
    """kill -9 of Redis, which starts again with what it knew when `earlier` was copied."""
    stack.kill("redis")
    shutil.rmtree(redis_log(stack))
    earlier.rename(redis_log(stack))
    stack.start("redis")
    stack.wait_ready("redis", READY_SECONDS)


def metric(stack: Stack, service: str, name: str, **labels: str) -> float:
    """A counter of a service's `/metrics`; 0 before the service has seen the run."""
    with urlopen(f"{stack.health_url(service)}/metrics", timeout=10) as answer:
        families = text_string_to_metric_families(answer.read().decode())
        samples = [sample for family in families for sample in family.samples]
    return float(sum(sample.value for sample in samples if (sample.name, sample.labels) == (name, labels)))


def logged(stack: Stack, name: str, event: str) -> list[dict[str, Any]]:
    """What a service logged under this event."""
    lines = (stack.logs / f"{name}.log").read_text().splitlines()
    entries: list[dict[str, Any]] = [json.loads(line) for line in lines if line.startswith("{")]
    return [entry for entry in entries if entry.get("event") == event]


def dumps_in(folder: Path) -> list[str]:
    """Dumps, notices, and hidden files that the plugin has not finished."""
    names = [path.name for path in folder.iterdir()]
    return [name for name in names if "hr-" in name]

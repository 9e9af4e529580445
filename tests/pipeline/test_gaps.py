"""A service dies in each gap between two steps of a sample's end; the next one finds its place."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from headrace.bus import Bus, keys
from headrace.bus.client import text
from headrace.dumps import DUMP_SUFFIX
from headrace.ids import RequestId
from headrace_cli.stack import Stack
from tests.support.crashing import Crash, CrashingStack
from tests.support.pipeline import (
    assert_nothing_left,
    assert_right,
    lines_of,
    logged,
    redis_log,
    running,
    set_redis_back,
    stack_config,
    submit,
    wait_finished,
    write_run_file,
    write_samples,
)
from tests.support.waiting import wait_until

pytestmark = pytest.mark.pipeline

SAMPLES = 24
COPIED, CRASHED = 2, 8  # calls of the step behind the gap
# A watcher that is away takes its leases along: they must outlast its next start, however slow the machine is.
PATIENT = {"HEADRACE_LEASE_GRACE_SECONDS": "30", "HEADRACE_LEASE_CAPTURED_SECONDS": "30"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Scene:
    """What is there at the moment of the crash, of the sample that the crash hit."""

    stack: Stack
    bus: Bus
    output: Path
    ordinal: int

    @property
    def state(self) -> str:
        return text(self.bus.redis.hget(keys.opened("test"), self.ordinal) or b"").partition("|")[0]

    @property
    def is_done(self) -> bool:
        return bool(self.bus.redis.getbit(keys.done("test"), self.ordinal))

    @property
    def is_queued(self) -> bool:
        return any(RequestId.parse(name).ordinal == self.ordinal for name in self.bus.jobs.queued(self.site))

    @property
    def site(self) -> str:
        (name,) = self.bus.sites.names()
        return name

    @property
    def has_row(self) -> bool:
        return any(path.stem == f"{self.ordinal:09}" for path in (self.output / "rows").rglob("*.safetensors"))

    @property
    def has_line(self) -> bool:
        return any(line.ordinal == self.ordinal for line in lines_of(self.output))

    @property
    def has_dump(self) -> bool:
        return any(self.stack.dump_dir.glob(f"hr-test-{self.ordinal}-*{DUMP_SUFFIX}"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Gap:
    """Before a call of `target` by `service`; `there` proves the place, `after` what the next one must have done."""

    service: str
    target: str
    there: Callable[[Scene], bool]
    after: Callable[[Stack], bool]
    environ: Mapping[str, str] = field(default_factory=dict)


def found(**what: bool) -> Callable[[Stack], bool]:
    """The next writer said of some sample that it found this, with a storage job that followed the lost one."""

    def said(stack: Stack) -> bool:
        stored = logged(stack, "writer", "stored")
        again = {entry["request"] for entry in logged(stack, "dispatcher", "storage job queued again")}
        return any(entry["request"] in again and what.items() <= entry.items() for entry in stored)

    return said


GAPS = {
    "captured-enqueued": Gap(
        service="watcher",
        target="headrace.bus.jobs:Jobs.queue_store",
        there=lambda scene: scene.state == "captured" and not scene.is_queued and not scene.has_row,
        after=lambda stack: not logged(stack, "dispatcher", "storage job queued again"),
        environ=PATIENT,
    ),
    "enqueued-row": Gap(
        service="writer",
        target="os:link",
        there=lambda scene: scene.state == "captured" and not scene.is_queued and not scene.has_row,
        after=found(adopted=False, already=False),
    ),
    "row-line": Gap(
        service="writer",
        target="headrace_writer.manifest:ManifestWriter.append",
        there=lambda scene: scene.has_row and not scene.has_line,
        after=found(adopted=True),
    ),
    "line-stored": Gap(
        service="writer",
        target="headrace.bus.requests:Requests.stored",
        there=lambda scene: scene.has_line and not scene.is_done,
        after=found(already=True),
    ),
    "stored-unlink": Gap(
        service="writer",
        target="headrace_writer.handler:finish",
        there=lambda scene: scene.is_done and scene.has_dump,
        after=lambda stack: (
            [entry["reason"] for entry in logged(stack, "watcher", "swept")] == ["its sample is stored already"]
        ),
    ),
}


@pytest.mark.parametrize("gap", GAPS.values(), ids=GAPS.keys())
def test_a_crash_in_a_gap_costs_no_attempt_and_stores_one_right_row_each(gap: Gap, tmp_path: Path, tiny: Path) -> None:
    data = write_samples(tmp_path / "data.jsonl", SAMPLES, seed=8)
    run_file = write_run_file(tmp_path, data, tiny)
    output = tmp_path / "dataset"
    stack = crashing_stack(tmp_path, tiny, gap.service, gap.target, environ=gap.environ)
    with running(stack) as bus:
        submit(bus, run_file)
        crash_in(gap, stack, bus, output)
        stack.start(gap.service)
        view = wait_finished(bus, "test")
        assert_nothing_left(stack, bus, "test")
        wait_until(lambda: gap.after(stack), 30, "the log of the next service")
        assert (view.reasons, bus.runs.dead("test")) == ({}, [])
    assert_right(view, output, tiny)
    assert len(lines_of(output)) == SAMPLES


@pytest.mark.parametrize("gap", GAPS.values(), ids=GAPS.keys())
def test_a_crash_in_a_gap_and_a_redis_set_back_store_one_right_row_each(gap: Gap, tmp_path: Path, tiny: Path) -> None:
    data = write_samples(tmp_path / "data.jsonl", SAMPLES, seed=9)
    run_file = write_run_file(tmp_path, data, tiny)
    output = tmp_path / "dataset"
    earlier = tmp_path / "earlier"
    stack = crashing_stack(tmp_path, tiny, gap.service, gap.target, earlier=earlier)
    with running(stack) as bus:
        submit(bus, run_file)
        crash_in(gap, stack, bus, output)
        set_redis_back(stack, earlier)
        stack.start(gap.service)
        view = wait_finished(bus, "test")
        assert_nothing_left(stack, bus, "test")
        assert view.mismatches == 0
    assert_right(view, output, tiny)
    assert len(lines_of(output)) == SAMPLES


def test_a_crash_between_the_lines_of_rejected_samples_and_their_mark_writes_no_line_twice(
    tmp_path: Path, tiny: Path
) -> None:
    data = write_samples(tmp_path / "data.jsonl", 4)
    with data.open("a") as file:
        for number in range(3):
            sample = {"id": f"long{number}", "input_ids": [5] * 500, "loss_mask": [1] * 500}
            file.write(json.dumps(sample) + "\n")
    run_file = write_run_file(tmp_path, data, tiny, max_length=400)
    output = tmp_path / "dataset"
    stack = crashing_stack(tmp_path, tiny, "writer", "headrace.bus.runs:Runs.mark_done", at=1)
    with running(stack) as bus:
        submit(bus, run_file)
        stack.wait_crash(60)
        view = bus.runs.get("test")
        assert view is not None
        assert view.rejected == 0
        assert sorted(line.ordinal for line in lines_of(output) if line.status == "rejected") == [4, 5, 6]
        stack.start("writer")
        view = wait_finished(bus, "test")
        assert_nothing_left(stack, bus, "test")
    assert (view.stored, view.rejected, view.rejected_by) == (4, 3, {"too_long": 3})
    assert sorted(line.ordinal for line in lines_of(output)) == list(range(7))


def crashing_stack(
    tmp_path: Path,
    tiny: Path,
    service: str,
    target: str,
    *,
    at: int = CRASHED,
    earlier: Path | None = None,
    environ: Mapping[str, str] | None = None,
) -> CrashingStack:
    """A stack whose service will crash; with `earlier`, what Redis knew a few samples before that is copied there."""
    stack = CrashingStack(stack_config(tmp_path / "stack", tiny, environ=environ))
    copy = None if earlier is None else (str(redis_log(stack)), str(earlier), COPIED)
    stack.crash = Crash(service=service, target=target, at=at, note=str(tmp_path / "note"), copy=copy)
    return stack


def crash_in(gap: Gap, stack: CrashingStack, bus: Bus, output: Path) -> None:
    """Wait for the crash, and prove that it came where it should."""
    note = stack.wait_crash(60)
    named = re.search(r"hr-test-(\d+)-|/(\d{9})\.safetensors|ordinal=(\d+),", note)
    assert named is not None, note
    ordinal = int(next(group for group in named.groups() if group))
    assert gap.there(Scene(stack=stack, bus=bus, output=output, ordinal=ordinal)), f"ordinal {ordinal}, {note}"

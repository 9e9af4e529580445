"""Samples that failed are extracted again on wish, until every one is stored right."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from headrace.bus import Bus
from headrace.bus.values import RunView
from headrace_cli.submit import submit_run
from tests.support.faults import hits_of, write_plan
from tests.support.oracle import assert_rows_are_the_models
from tests.support.pipeline import (
    READY_SECONDS,
    assert_nothing_left,
    assert_right,
    lines_of,
    make_stack,
    running,
    submit,
    wait_finished,
    write_run_file,
    write_samples,
)

pytestmark = pytest.mark.pipeline

# However often two samples of 60 fail, the run stays below the default limit of mismatches.
SAMPLES, BAD = 60, [17, 59]
ATTEMPTS = 2


def try_again(bus: Bus, run_file: Path) -> RunView:
    submit_run(bus, run_file, start=0, end=None, limit=None, engine_check=True, only_failed=True)
    return wait_finished(bus, "test")


def test_samples_that_failed_are_tried_again_until_all_are_stored_right(
    tmp_path: Path, tiny: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    data = write_samples(tmp_path / "data.jsonl", SAMPLES, seed=8)
    run_file = write_run_file(tmp_path, data, tiny, max_attempts=ATTEMPTS)
    plan = write_plan(tmp_path / "plan.toml", {"kind": "nan", "ordinals": BAD, "times": 99})
    stack = make_stack(tmp_path / "stack", tiny, engine=("--faults", str(plan)))
    output = tmp_path / "dataset"
    with running(stack) as bus:
        submit(bus, run_file)
        for tries in (1, 2):
            view = wait_finished(bus, "test") if tries == 1 else try_again(bus, run_file)
            assert (view.stored, view.failed_by) == (SAMPLES - len(BAD), {"not_finite": len(BAD)})
            assert len(hits_of(plan)) == tries * ATTEMPTS * len(BAD), "no other sample was extracted again"
            failed = [line for line in lines_of(output) if line.status == "failed"]
            assert sorted(line.ordinal for line in failed) == sorted(tries * BAD)
            assert len({line.request for line in failed}) == tries * len(BAD), (
                "a line for each attempt that was the last"
            )

        stack.kill("engine")
        flags = [flag for flag in stack.config.engine if flag not in ("--faults", str(plan))]
        stack.config = replace(stack.config, engine=tuple(flags))
        stack.start("engine")
        stack.wait_ready("engine", READY_SECONDS)
        stack.wait_ready("watcher", READY_SECONDS)
        capfd.readouterr()
        view = try_again(bus, run_file)
        assert f"failed samples that go again: {len(BAD)} (not_finite {len(BAD)})" in capfd.readouterr().out
        assert view.failed_by == {}
        assert_nothing_left(stack, bus, "test")
        # A Redis that knows nothing but the folder says the same.
        bus.redis.flushall()
        view = submit_run(bus, run_file, start=0, end=None, limit=None, engine_check=False, only_failed=True)
        assert (view.state, view.stored, view.failed) == ("finished", SAMPLES, 0)
    assert_right(view, output, tiny)
    assert_rows_are_the_models(output, data, tiny, (2, 4, 5))

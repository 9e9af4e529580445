"""Each of the five processes is killed in the middle of a run, and Redis set back; the outcome is the same."""

from __future__ import annotations

import shutil
import time
from pathlib import Path

import pytest

from headrace_cli.stack import SERVICES
from tests.support.oracle import assert_rows_are_the_models
from tests.support.pipeline import (
    READY_SECONDS,
    assert_nothing_left,
    assert_right,
    lines_of,
    make_stack,
    redis_log,
    running,
    set_redis_back,
    submit,
    wait_finished,
    wait_stored,
    write_run_file,
    write_samples,
)

pytestmark = pytest.mark.pipeline

SAMPLES = 200
BOUNDARIES = (2, 4, 5)


def test_kill_9_of_every_process_costs_no_sample_and_stores_no_wrong_row(tmp_path: Path, tiny: Path) -> None:
    data = write_samples(tmp_path / "data.jsonl", SAMPLES, seed=3)
    run_file = write_run_file(tmp_path, data, tiny)
    stack = make_stack(tmp_path / "stack", tiny)
    output = tmp_path / "dataset"
    with running(stack) as bus:
        submit(bus, run_file)
        stored = 0
        for name in ("writer", "watcher", "dispatcher", "engine", "redis"):
            stored = wait_stored(bus, "test", stored + 15).stored
            assert stored < SAMPLES, "the run ended before every process was killed"
            stack.kill(name)
            stack.start(name)
            if name == "redis":
                stack.wait_ready("redis", READY_SECONDS)
        view = wait_finished(bus, "test")
        for name in SERVICES:
            stack.wait_ready(name, READY_SECONDS)
        assert_nothing_left(stack, bus, "test")
    assert_right(view, output, tiny)
    assert_rows_are_the_models(output, data, tiny, BOUNDARIES)


def test_redis_set_back_by_a_second_is_behind_the_manifest_and_catches_up(tmp_path: Path, tiny: Path) -> None:
    data = write_samples(tmp_path / "data.jsonl", 80, seed=4)
    run_file = write_run_file(tmp_path, data, tiny)
    stack = make_stack(tmp_path / "stack", tiny)
    output = tmp_path / "dataset"
    with running(stack) as bus:
        submit(bus, run_file)
        earlier = wait_stored(bus, "test", 10)
        time.sleep(1.1)  # what the server appended is in its file after a second at most
        shutil.copytree(redis_log(stack), tmp_path / "earlier")
        wait_stored(bus, "test", earlier.stored + 15)
        set_redis_back(stack, tmp_path / "earlier")
        view = wait_finished(bus, "test")
        assert_nothing_left(stack, bus, "test")
    assert_right(view, output, tiny)
    assert len({line.ordinal for line in lines_of(output)}) == len(lines_of(output)) == 80

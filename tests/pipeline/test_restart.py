"""Each of the five processes is killed once in the middle of a run; the outcome is the same."""

from __future__ import annotations

from pathlib import Path

import pytest

from headrace_cli.stack import SERVICES
from tests.support.pipeline import (
    READY_SECONDS,
    assert_nothing_left,
    assert_right,
    make_stack,
    running,
    submit,
    wait_finished,
    wait_stored,
    write_run_file,
    write_samples,
)

pytestmark = pytest.mark.pipeline

SAMPLES = 200


def test_kill_9_of_every_process_costs_no_sample_and_stores_no_wrong_row(tmp_path: Path, tiny: Path) -> None:
    data = write_samples(tmp_path / "data.jsonl", SAMPLES, seed=3)
    run_file = write_run_file(tmp_path, data, tiny)
    stack = make_stack(tmp_path / "stack", tiny)
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
    assert_right(view, tmp_path / "dataset", tiny)

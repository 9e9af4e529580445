"""A dump folder at its cap: the dispatcher waits for the writer, nothing is lost, and no byte is over."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from headrace.bus import Bus
from headrace_cli.stack import Stack
from tests.support.filesystems import small_tmpfs
from tests.support.pipeline import (
    assert_nothing_left,
    assert_right,
    running,
    stack_config,
    submit,
    wait_finished,
    write_run_file,
    write_samples,
)
from tests.support.waiting import wait_until

pytestmark = pytest.mark.pipeline

SAMPLES = 2000
CAP = 1 << 20
FULL, EMPTY = 0.85 * CAP, 0.3 * CAP
TURNS = 4


@pytest.mark.timeout(900)
def test_a_folder_at_its_cap_loses_nothing_and_is_never_over_it(tmp_path: Path, tiny: Path) -> None:
    data = write_samples(tmp_path / "data.jsonl", SAMPLES, longest=12, seed=10)
    run_file = write_run_file(tmp_path, data, tiny, max_attempts=1)
    output = tmp_path / "dataset"
    # The filesystem has room beyond the cap: it is the cap that holds.
    with small_tmpfs(tmp_path / "dumps", 4 * CAP >> 10) as dumps:
        config = stack_config(tmp_path / "stack", tiny, environ={"HEADRACE_DUMP_CAP_BYTES": str(CAP)})
        stack = Stack(replace(config, dump_dir=dumps / "headrace"))
        with running(stack) as bus, measured(dumps) as sizes:
            submit(bus, run_file)
            for _ in range(TURNS):
                fill_and_empty(stack, bus, dumps)
            view = wait_finished(bus, "test")
            assert_nothing_left(stack, bus, "test")
            assert (view.reasons, bus.runs.dead("test")) == ({}, [])
        assert 0.8 * CAP < max(sizes) <= CAP
    assert_right(view, output, tiny)


def fill_and_empty(stack: Stack, bus: Bus, dumps: Path) -> None:
    """Stop the writer until the folder is full, and let it go on until there is room; nothing is sent meanwhile."""
    os.kill(stack.pid("writer"), signal.SIGSTOP)
    try:
        wait_until(lambda: used(dumps) > FULL, 60, "the folder to fill up to its cap")
        view = bus.runs.get("test")
        assert view is not None
        assert view.open > 0
        bus.runs.pause("test", "until there is room")
    finally:
        os.kill(stack.pid("writer"), signal.SIGCONT)
    wait_until(lambda: used(dumps) < EMPTY, 60, "the writer to make room")
    assert bus.runs.activate("test") == "active"


@contextmanager
def measured(dumps: Path) -> Iterator[list[int]]:
    """Measure the folder all the time."""
    sizes, done = [0], threading.Event()

    def measure() -> None:
        while not done.wait(0.001):
            sizes.append(used(dumps))

    thread = threading.Thread(target=measure, daemon=True)
    thread.start()
    try:
        yield sizes
    finally:
        done.set()
        thread.join()


def used(dumps: Path) -> int:
    """Bytes that the file system holds, of whatever files."""
    status = os.statvfs(dumps)
    return (status.f_blocks - status.f_bfree) * status.f_frsize

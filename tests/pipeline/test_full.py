"""A destination that fills up in the middle of a run: the run waits, burns nothing, and goes on by itself."""

from __future__ import annotations

from pathlib import Path

import pytest

from headrace.bus import Bus, keys
from headrace.bus.values import DESTINATION_FULL
from tests.support.filesystems import fill, small_tmpfs
from tests.support.pipeline import (
    assert_nothing_left,
    assert_right,
    dumps_in,
    lines_of,
    make_stack,
    running,
    submit,
    wait_finished,
    wait_stored,
    write_run_file,
    write_samples,
)
from tests.support.waiting import wait_until

pytestmark = pytest.mark.pipeline

SAMPLES = 60


def test_a_full_destination_pauses_the_run_which_goes_on_when_there_is_room(tmp_path: Path, tiny: Path) -> None:
    data = write_samples(tmp_path / "data.jsonl", SAMPLES, seed=6)
    with small_tmpfs(tmp_path / "disk", 64 << 10) as disk:
        output = disk / "dataset"
        run_file = write_run_file(tmp_path, data, tiny, output=str(output), max_attempts=1)
        stack = make_stack(tmp_path / "stack", tiny)
        with running(stack) as bus:
            submit(bus, run_file)
            wait_stored(bus, "test", 10)
            filler = fill(disk)
            wait_until(lambda: is_paused(bus), 60, "the run to pause")
            # Long enough for every lease to have lapsed, were nobody to renew it, and for jobs to be tried again.
            wait_until(lambda: latest_job(bus) >= 4, 60, "jobs to be queued again")
            view = bus.runs.get("test")
            assert view is not None
            assert (view.state, view.reason, view.reasons) == ("paused", DESTINATION_FULL, {})
            assert 10 <= view.stored < SAMPLES
            assert dumps_in(stack.dump_dir)
            filler.unlink()
            view = wait_finished(bus, "test")
            assert (view.reasons, bus.runs.dead("test")) == ({}, [])
            assert_nothing_left(stack, bus, "test")
        assert_right(view, output, tiny)
        assert {line.status for line in lines_of(output)} == {"stored"}


def is_paused(bus: Bus) -> bool:
    view = bus.runs.get("test")
    return view is not None and (view.state, view.reason) == ("paused", DESTINATION_FULL)


def latest_job(bus: Bus) -> int:
    """The highest number of a storage job among the captured samples."""
    captured = [name.decode() for site in bus.sites.names() for name in bus.redis.zrange(keys.captured(site), 0, -1)]
    return max((int(bus.redis.hget(keys.request(name), "k") or 0) for name in captured), default=0)

"""A run from its samples to a verified dataset, through the real processes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from headrace.bus import keys
from tests.support.pipeline import (
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
from tests.support.waiting import wait_until

pytestmark = pytest.mark.pipeline


def test_a_run_is_stored_verified_and_leaves_nothing(tmp_path: Path, tiny: Path) -> None:
    data = write_samples(tmp_path / "data.jsonl", 40)
    run_file = write_run_file(tmp_path, data, tiny)
    stack = make_stack(tmp_path / "stack", tiny)
    with running(stack) as bus:
        submit(bus, run_file)
        view = wait_finished(bus, "test")
        assert view.mismatches == 0
        assert_nothing_left(stack, bus, "test")

        again = submit(bus, run_file)
        assert again.state == "finished"
        lines = len(lines_of(tmp_path / "dataset"))

        bus.redis.flushall()
        rebuilt = submit_when_registered(bus, run_file)
        assert (rebuilt.state, rebuilt.stored) == ("finished", 40)
        assert len(lines_of(tmp_path / "dataset")) == lines
        assert not keys_without_ttl_or_reason(bus)
        codes = stack.stop()
    assert codes == dict.fromkeys(("dispatcher", "watcher", "writer", "engine", "redis"), 0)
    assert_right(view, tmp_path / "dataset", tiny)


def test_redis_emptied_in_the_middle_is_rebuilt_from_the_folder(tmp_path: Path, tiny: Path) -> None:
    data = write_samples(tmp_path / "data.jsonl", 60, seed=2)
    run_file = write_run_file(tmp_path, data, tiny)
    stack = make_stack(tmp_path / "stack", tiny)
    with running(stack) as bus:
        submit(bus, run_file)
        wait_until(lambda: (v := bus.runs.get("test")) and v.stored >= 10, 60, "ten rows")
        bus.redis.flushall()
        submit_when_registered(bus, run_file)
        view = wait_finished(bus, "test")
        assert_nothing_left(stack, bus, "test")
    assert_right(view, tmp_path / "dataset", tiny)


def test_rejected_samples_get_a_line_and_the_books_balance(tmp_path: Path, tiny: Path) -> None:
    data = write_samples(tmp_path / "data.jsonl", 6)
    with data.open("a") as file:
        file.write(json.dumps({"id": "long", "input_ids": [5] * 500, "loss_mask": [1] * 500}) + "\n")
        file.write(json.dumps({"id": "untrained", "input_ids": [5, 6], "loss_mask": [0, 0]}) + "\n")
    run_file = write_run_file(tmp_path, data, tiny, max_length=400)
    with running(make_stack(tmp_path / "stack", tiny)) as bus:
        submit(bus, run_file)
        view = wait_finished(bus, "test")
    assert (view.stored, view.rejected, view.failed, view.open) == (6, 2, 0, 0)
    assert view.rejected_by == {"no_trained_tokens": 1, "too_long": 1}
    by_status = {(line.sample, line.status, line.reason) for line in lines_of(tmp_path / "dataset") if not line.path}
    assert by_status == {("long", "rejected", "too_long"), ("untrained", "rejected", "no_trained_tokens")}


def submit_when_registered(bus, run_file):  # type: ignore[no-untyped-def]
    """After Redis was emptied, the watcher registers with its next heartbeat."""
    wait_until(lambda: bus.sites.registered(), 30, "the site to register again")
    return submit(bus, run_file)


def keys_without_ttl_or_reason(bus) -> list[str]:  # type: ignore[no-untyped-def]
    """Keys of ours that would live forever for no named reason."""
    from fnmatch import fnmatchcase

    names = [name.decode() for name in bus.redis.scan_iter("hr:*") if bus.redis.ttl(name) == -1]
    return [name for name in names if not any(fnmatchcase(name, pattern) for pattern in keys.WITHOUT_TTL)]

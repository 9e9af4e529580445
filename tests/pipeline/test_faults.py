"""What goes wrong around a run for longer than a moment: it costs no sample, and no attempt where it must not."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

import pytest

from headrace.bus import Bus
from headrace_cli.stack import Stack, StackConfig
from tests.support.dispatching import DispatcherProcess, hanging_listener
from tests.support.dispatching import submit as submit_to_redis
from tests.support.pipeline import (
    MODEL_NAME,
    QUICK,
    READY_SECONDS,
    assert_nothing_left,
    assert_right,
    lines_of,
    make_stack,
    running,
    submit,
    wait_finished,
    wait_stored,
    write_run_file,
    write_samples,
)
from tests.support.stores import RUN
from tests.support.waiting import wait_until
from tests.support.watched import make_site

pytestmark = pytest.mark.pipeline


def restart_engine(stack: Stack, weights: str) -> None:
    """kill -9, and the same engine with another weight version."""
    stack.kill("engine")
    flags = [flag for flag in stack.config.engine if flag != "--weight-version"][:-1]
    stack.config = replace(stack.config, engine=(*flags, "--weight-version", weights))
    stack.start("engine")


def test_an_engine_with_other_weights_burns_nothing_and_as_before_it_goes_on(tmp_path: Path, tiny: Path) -> None:
    data = write_samples(tmp_path / "data.jsonl", 120, seed=5)
    stack = make_stack(tmp_path / "stack", tiny, engine=("--weight-version", "w1"))
    with running(stack) as bus:
        submit(bus, write_run_file(tmp_path, data, tiny, max_attempts=1))
        wait_stored(bus, "test", 10)
        restart_engine(stack, "w2")

        def waits() -> bool:
            view = bus.runs.get("test")
            return view is not None and "'w2'" in view.waiting_for and "bring the engine back" in view.waiting_for

        wait_until(waits, READY_SECONDS, "the run to say what it waits for")
        view = bus.runs.get("test")
        assert view is not None
        assert view.stored < 120, "the run ended before the engine changed"
        restart_engine(stack, "w1")
        view = wait_finished(bus, "test")
        assert (view.mismatches, view.waiting_for) == (0, "")
        assert bus.runs.dead("test") == []
        assert_nothing_left(stack, bus, "test")
    assert_right(view, tmp_path / "dataset", tiny)


def test_redis_away_for_longer_than_every_lease_fails_no_sample(tmp_path: Path, tiny: Path) -> None:
    data = write_samples(tmp_path / "data.jsonl", 150, seed=6)
    longest = 12.0  # longer than the services' pauses between attempts at Redis
    stack = make_stack(tmp_path / "stack", tiny, environ={"HEADRACE_LEASE_STORING_SECONDS": str(longest)})
    with running(stack) as bus:
        submit(bus, write_run_file(tmp_path, data, tiny, max_attempts=1))
        stored = wait_stored(bus, "test", 20).stored
        assert stored < 150, "the run ended before Redis went away"
        stack.stop_one("redis")
        time.sleep(longest + 1)
        stack.start("redis")
        stack.wait_ready("redis", READY_SECONDS)
        view = wait_finished(bus, "test")
        assert view.failed == 0
        assert_nothing_left(stack, bus, "test")
    assert_right(view, tmp_path / "dataset", tiny)


def test_a_dispatcher_ends_in_time_while_an_engine_never_answers(tmp_path: Path, redis_url: str, bus: Bus) -> None:
    drain = 1.0
    with hanging_listener() as url, DispatcherProcess(tmp_path, redis_url, drain_seconds=drain) as dispatcher:
        bus.sites.register(make_site("s1", url=url), 3600)
        submit_to_redis(bus, tmp_path / "dataset", [5] * 40, max_attempts=1)

        def in_flight() -> bool:
            view = bus.runs.get(RUN)
            return view is not None and view.in_flight == 40

        wait_until(in_flight, 30, "forty requests in flight")
        dispatcher.process.terminate()
        assert dispatcher.process.wait(drain + 10) == 0
    view = bus.runs.get(RUN)
    assert view is not None
    assert (view.pending, view.in_flight) == (40, 0)
    assert bus.runs.dead(RUN) == []


def test_two_dispatchers_and_two_writers_store_each_sample_once(tmp_path: Path, tiny: Path) -> None:
    data = write_samples(tmp_path / "data.jsonl", 120, seed=7)
    stack = make_stack(tmp_path / "stack", tiny)
    with running(stack) as bus:
        second = Stack(
            StackConfig(
                folder=tmp_path / "second",
                model=tiny,
                model_name=MODEL_NAME,
                redis_url=stack.redis_url,
                redis_password=(stack.folder / "redis-password").read_text(),
                dump_dir=stack.dump_dir,
                environ=QUICK,
            )
        )
        with second:
            for name in ("dispatcher", "writer"):
                second.start(name)
                second.wait_ready(name, READY_SECONDS)
            assert bus.dispatchers.alive() == 2
            submit(bus, write_run_file(tmp_path, data, tiny))
            view = wait_finished(bus, "test")
            assert_nothing_left(stack, bus, "test")
            assert second.stop() == {"dispatcher": 0, "writer": 0}
    assert_right(view, tmp_path / "dataset", tiny)
    lines = lines_of(tmp_path / "dataset")
    assert sorted(line.ordinal for line in lines) == list(range(120))
    assert len(list((tmp_path / "dataset" / "manifest").iterdir())) >= 2, "one of the writers had nothing to do"
    assert view.mismatches == 0

"""Each lease lapses once: whoever held it is gone, the sample goes on, and what comes late does no harm."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from headrace.bus import Bus, keys
from headrace.dumps import DUMP_SUFFIX
from headrace_cli.stack import Stack
from tests.support.pipeline import (
    READY_SECONDS,
    assert_nothing_left,
    assert_right,
    lines_of,
    logged,
    make_stack,
    metric,
    running,
    stopped,
    submit,
    wait_finished,
    wait_reason,
    write_run_file,
    write_samples,
)
from tests.support.waiting import wait_until

pytestmark = pytest.mark.pipeline

# A watcher or an engine that stands still for a while keeps its registration.
REGISTERED = {"HEADRACE_SITE_TTL_SECONDS": "60"}


def test_requests_of_a_dispatcher_that_died_lapse_and_are_sent_again(tmp_path: Path, tiny: Path) -> None:
    run_file = write_run_file(tmp_path, write_samples(tmp_path / "data.jsonl", 4), tiny, max_attempts=2)
    stack = make_stack(tmp_path / "stack", tiny, environ=REGISTERED)
    with running(stack) as bus:
        with stopped(stack, "engine"):
            submit(bus, run_file)
            wait_until(lambda: bus.redis.zcard(keys.in_flight("test")) == 4, 30, "four requests in flight")
            stack.kill("dispatcher")
            stack.start("dispatcher")
            wait_reason(bus, "test", "lapsed", 4)
        view = wait_finished(bus, "test")
        assert_nothing_left(stack, bus, "test")
        # The engine may have answered the first requests when it went on; their dumps are as good.
        assert {**view.reasons, "duplicate": 0} == {"lapsed": 4, "duplicate": 0}
        assert sorted(reason for *_, reason in bus.runs.dead("test")) == ["lapsed"] * 4
        assert metric(stack, "dispatcher", "headrace_lapses_total", run="test", reason="lapsed") == 4
    assert_right(view, tmp_path / "dataset", tiny)


@pytest.mark.parametrize("late_after_the_row", [False, True], ids=["duplicate", "swept"])
def test_of_two_attempts_that_both_publish_one_becomes_a_row(
    late_after_the_row: bool, tmp_path: Path, tiny: Path
) -> None:
    run_file = write_run_file(tmp_path, write_samples(tmp_path / "data.jsonl", 1), tiny, max_attempts=2)
    output = tmp_path / "dataset"
    stack = make_stack(tmp_path / "stack", tiny, environ=REGISTERED)
    with running(stack) as bus:
        stack.stop_one("writer")
        with stopped(stack, "watcher"):
            submit(bus, run_file)
            (first,) = wait_until(lambda: published(stack), 30, "a dump")
            first.rename(tmp_path / first.name)
        wait_reason(bus, "test", "no_dump", 1)
        wait_until(lambda: number_captured(bus) == 1, 30, "the second attempt's dump")
        if late_after_the_row:
            stack.start("writer")
            wait_finished(bus, "test")
        (tmp_path / first.name).rename(first)
        wait_until(lambda: not first.exists(), 30, "the late dump to go")
        if not late_after_the_row:
            stack.start("writer")
        view = wait_finished(bus, "test")
        assert_nothing_left(stack, bus, "test")
        assert view.reasons == {"no_dump": 1, **({} if late_after_the_row else {"duplicate": 1})}
    duplicates = logged(stack, "watcher", "duplicate: another request of the sample was captured")
    swept = logged(stack, "watcher", "swept")
    assert (len(duplicates), len(swept)) == ((0, 1) if late_after_the_row else (1, 0))
    assert_right(view, output, tiny)
    (line,) = lines_of(output)
    assert line.request != first.name.removesuffix(DUMP_SUFFIX)


def test_a_captured_sample_whose_dump_is_gone_is_extracted_again(tmp_path: Path, tiny: Path) -> None:
    run_file = write_run_file(tmp_path, write_samples(tmp_path / "data.jsonl", 6), tiny, max_attempts=2)
    stack = make_stack(tmp_path / "stack", tiny)
    with running(stack) as bus:
        stack.stop_one("writer")
        submit(bus, run_file)
        wait_until(lambda: number_captured(bus) == 6, 60, "six captured samples")
        (gone,) = (path for path in published(stack) if path.name.startswith("hr-test-2-"))
        gone.unlink()
        wait_reason(bus, "test", "dump_gone", 1)
        wait_until(lambda: number_captured(bus) == 6, 60, "the sixth sample to be captured again")
        stack.start("writer")
        view = wait_finished(bus, "test")
        assert_nothing_left(stack, bus, "test")
        assert view.reasons == {"dump_gone": 1}
        assert bus.runs.dead("test") == [(gone.name.removesuffix(DUMP_SUFFIX), 1, "dump_gone")]
        assert metric(stack, "dispatcher", "headrace_lapses_total", run="test", reason="dump_gone") == 1
    assert_right(view, tmp_path / "dataset", tiny)


def test_a_folder_that_is_lost_with_its_dumps_is_evicted_with_its_queue(tmp_path: Path, tiny: Path) -> None:
    samples = 60
    run_file = write_run_file(tmp_path, write_samples(tmp_path / "data.jsonl", samples), tiny, max_attempts=2)
    stack = make_stack(tmp_path / "stack", tiny)
    with running(stack) as bus:
        (old,) = bus.sites.names()
        stack.stop_one("writer")
        submit(bus, run_file)
        wait_until(lambda: bus.jobs.depth(old) == samples, 60, "sixty storage jobs")
        stack.kill("watcher")
        stack.kill("engine")
        shutil.rmtree(stack.dump_dir)
        for name in ("engine", "watcher", "writer"):
            stack.start(name)
        stack.wait_ready("watcher", READY_SECONDS)
        view = wait_finished(bus, "test")
        assert_nothing_left(stack, bus, "test")
        assert view.reasons == {"dump_gone": samples}
        wait_until(lambda: logged(stack, "dispatcher", "site evicted"), 30, "the eviction")
        assert old not in bus.sites.names()
        assert [name.decode() for name in bus.redis.scan_iter("*") if old.encode() in name] == []
        assert list(bus.redis.scan_iter("rq:job:*")) == []
    assert_right(view, tmp_path / "dataset", tiny)


def published(stack: Stack) -> list[Path]:
    """The dumps of the run."""
    return sorted(stack.dump_dir.glob(f"hr-test-*{DUMP_SUFFIX}"))


def number_captured(bus: Bus) -> int:
    """Samples that are captured and not stored, at all sites."""
    return sum(bus.redis.zcard(keys.captured(site)) for site in bus.sites.names())

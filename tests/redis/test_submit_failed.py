"""`headrace submit --only-failed`: what it says, and what it refuses."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from headrace.bus import Bus, keys
from headrace.ids import RequestId
from headrace.messages import Record
from headrace_writer.store import Store
from tests.support.bus_values import BOOT, SITE, make_attempt, make_line, make_site
from tests.support.commands import assert_one_line, headrace
from tests.support.dispatching import view_of, write_lines
from tests.support.prepared import ready, run_file, write_data
from tests.support.stores import AT

pytestmark = pytest.mark.redis

RUN = "demo"


def submit(file: Path, url: str, *options: str) -> subprocess.CompletedProcess[str]:
    return headrace("submit", file, "--no-engine-check", *options, HEADRACE_REDIS_URL=url)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """The file of a run of the first four of five samples."""
    write_data(tmp_path / "data.jsonl", *(ready(1, 2, 3 + number) for number in range(5)))
    return run_file(tmp_path)


@pytest.fixture
def submitted(bus: Bus, redis_url: str, file: Path) -> Path:
    assert submit(file, redis_url, "--limit", "4").returncode == 0
    return file


def fail(bus: Bus, reasons: dict[int, str]) -> None:
    """Samples fail, and Redis and the manifest say so."""
    spec = view_of(bus, RUN).spec
    store = Store(Path(spec.output), spec, "w1")
    records = [
        Record(ordinal=ordinal, sample=f"s{ordinal}", status="failed", reason=reason, request="", tokens=3)
        for ordinal, reason in reasons.items()
    ]
    bus.runs.mark_done(RUN, store.record(records, AT))
    store.close()


def test_a_run_that_was_never_submitted_is_a_usage_error_and_leaves_no_trace(
    bus: Bus, redis_url: str, file: Path
) -> None:
    refused = submit(file, redis_url, "--only-failed")
    assert_one_line(refused, 2, "'demo'", str(file.parent / "out"), "without --only-failed")
    assert not (file.parent / "out").exists()
    assert bus.runs.names() == []


def test_a_run_of_which_no_sample_failed_is_left_as_it_is(bus: Bus, redis_url: str, submitted: Path) -> None:
    said = submit(submitted, redis_url, "--limit", "4", "--only-failed")
    assert (said.returncode, said.stderr) == (0, "")
    assert "run demo is active, and no sample of it failed: stored 0 / 4" in said.stdout
    bus.runs.mark_done(RUN, [make_line(ordinal) for ordinal in range(4)])
    # It is finished: there is nothing to wait for.
    (Path(view_of(bus, RUN).spec.output) / "manifest").mkdir()
    lines = b"".join(make_line(ordinal).encode() for ordinal in range(4))
    (Path(view_of(bus, RUN).spec.output) / "manifest" / "a.jsonl").write_bytes(lines)
    said = submit(submitted, redis_url, "--limit", "4", "--only-failed", "--wait")
    assert said.returncode == 0
    assert "run demo is finished, and no sample of it failed: stored 4 / 4" in said.stdout


def test_the_failed_samples_go_again_and_are_told_by_reason(bus: Bus, redis_url: str, submitted: Path) -> None:
    fail(bus, {0: "timeout", 1: "nan", 2: "timeout", 3: "nan"})
    assert "--only-failed" in submit(submitted, redis_url, "--limit", "4").stdout, "a finished run names the way"
    assert view_of(bus, RUN).state == "finished"
    said = submit(submitted, redis_url, "--limit", "4", "--only-failed")
    assert (said.returncode, said.stderr) == (0, "")
    assert "run demo: failed samples that go again: 4 (nan 2, timeout 2)" in said.stdout
    assert (view_of(bus, RUN).state, view_of(bus, RUN).open) == ("active", 4)
    # Redis lost, too: the folder says who failed.
    bus.redis.flushall()
    assert "failed samples that go again: 4" in submit(submitted, redis_url, "--limit", "4", "--only-failed").stdout
    assert (view_of(bus, RUN).state, view_of(bus, RUN).open) == ("active", 4)


def test_samples_whose_lines_are_not_written_yet_are_told_too(bus: Bus, redis_url: str, submitted: Path) -> None:
    bus.sites.register(make_site(), 3600)
    attempts = view_of(bus, RUN).spec.max_attempts
    assert bus.runs.feed(RUN, 0, [""]) == 1
    for number in range(attempts):
        attempt = make_attempt(0, f"{number:08d}", run=RUN)
        assert bus.requests.claim(RUN, SITE, BOOT, [attempt]) == ["claimed"]
        bus.requests.end(RequestId.parse(attempt.request), burn=True, kind="error", reason="timeout")
    assert bus.runs.pending(RUN, 9) == []
    said = submit(submitted, redis_url, "--limit", "4", "--only-failed")
    assert "failed samples that go again: 1 (timeout 1)" in said.stdout
    assert bus.runs.pending(RUN, 9) == [0]


def test_a_cancelled_run_is_a_conflict_and_stays_cancelled(bus: Bus, redis_url: str, submitted: Path) -> None:
    for failed in (0, 1):
        if failed:
            fail(bus, {1: "nan"})
        bus.runs.cancel(RUN)
        refused = submit(submitted, redis_url, "--limit", "4", "--only-failed")
        assert_one_line(refused, 4, "cancelled", f"{4 - failed} samples open", "without --only-failed first")
        assert (view_of(bus, RUN).state, view_of(bus, RUN).failed) == ("cancelled", failed)
    assert submit(submitted, redis_url, "--limit", "4").returncode == 0
    assert submit(submitted, redis_url, "--limit", "4", "--only-failed").returncode == 0


def test_an_engine_is_asked_for_only_when_a_sample_failed(bus: Bus, redis_url: str, submitted: Path) -> None:
    arguments = ("submit", submitted, "--limit", "4", "--only-failed")
    said = headrace(*arguments, HEADRACE_REDIS_URL=redis_url)
    assert said.returncode == 0
    assert "no sample of it failed" in said.stdout
    fail(bus, {1: "nan"})
    assert_one_line(headrace(*arguments, HEADRACE_REDIS_URL=redis_url), 3, "no engine is registered")
    assert view_of(bus, RUN).failed == 1
    bus.redis.flushall()  # now everything that the folder lacks would begin
    assert_one_line(headrace(*arguments, HEADRACE_REDIS_URL=redis_url), 3, "no engine is registered")
    assert bus.runs.names() == []


def test_no_run_with_failed_samples_is_said_to_have_none(bus: Bus, redis_url: str, submitted: Path) -> None:
    fail(bus, {1: "nan"})
    bus.redis.delete(keys.failed(RUN))  # as an earlier version left it
    write_lines(Path(view_of(bus, RUN).spec.output), [1])
    said = submit(submitted, redis_url, "--limit", "4", "--only-failed")
    assert (said.returncode, said.stderr) == (0, "")
    assert "of its 1 failed samples none goes again" in said.stdout
    assert "headrace verify" in said.stdout


def test_another_selection_than_that_of_the_run_is_another_extraction(
    bus: Bus, redis_url: str, submitted: Path
) -> None:
    fail(bus, {1: "nan"})
    for selection in ([], ["--limit", "3"], ["--start", "1"]):
        assert_one_line(submit(submitted, redis_url, "--only-failed", *selection), 4, "another extraction")
    assert view_of(bus, RUN).failed == 1


def test_a_paused_run_says_how_it_goes_on(bus: Bus, redis_url: str, submitted: Path) -> None:
    fail(bus, {1: "nan"})
    bus.runs.pause(RUN, "why")
    said = submit(submitted, redis_url, "--limit", "4", "--only-failed")
    assert "failed samples that go again: 1 (nan 1)" in said.stdout
    assert "paused (why); go on with: headrace resume demo" in said.stdout


def test_waiting_for_the_samples_that_go_again_follows_the_run(bus: Bus, redis_url: str, submitted: Path) -> None:
    fail(bus, {0: "nan", 1: "nan", 2: "nan", 3: "nan"})
    bus.runs.pause(RUN, "x")  # of no effect: it is finished
    said = submit(submitted, redis_url, "--limit", "4", "--only-failed")
    assert said.returncode == 0
    bus.runs.pause(RUN, "by hand")
    waited = submit(submitted, redis_url, "--limit", "4", "--only-failed", "--wait")
    assert waited.returncode == 4
    assert "is paused: by hand" in waited.stderr

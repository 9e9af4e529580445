"""Samples that failed are tried again on wish, and no line of an earlier failure closes them meanwhile."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from shutil import copytree, rmtree
from typing import Literal

import pytest

from headrace.bus import Bus, keys
from headrace.manifest import Line
from headrace.messages import Record
from headrace.runs import RunSpec
from headrace_dispatcher.rebuild import rebuild, retry_failed
from headrace_writer.store import Store
from tests.redis.test_writer_handler import IDENTITY, SITE
from tests.support.bus_values import make_line
from tests.support.dispatching import DispatcherProcess, view_of, write_inputs
from tests.support.server import ValkeyServer
from tests.support.stores import AT, RUN, Sample, make_sample
from tests.support.waiting import wait_until

pytestmark = pytest.mark.redis

TOTAL = 5
SAMPLES = [make_sample(ordinal) for ordinal in range(TOTAL)]


class Bench:
    """A run of one attempt a sample, whose lines a real writer writes."""

    def __init__(self, bus: Bus, folder: Path) -> None:
        self.bus, self.folder = bus, folder
        self.output = folder / "dataset"
        self.spec: RunSpec = write_inputs(self.output, SAMPLES, max_attempts=1)
        self.store = Store(self.output, self.spec, "w1")
        bus.sites.register(SITE, 3600)
        rebuild(bus, self.spec)
        bus.runs.feed(RUN, 0, [""] * TOTAL)

    def fail(self, sample: Sample, reason: str, attempt: int = 0) -> None:
        """The sample's one attempt is claimed and fails, its dump refused."""
        claimed = self.bus.requests.claim(RUN, SITE.site, SITE.boot, [sample.opened(attempt)])
        assert claimed == ["claimed"]
        assert self.bus.requests.end(sample.request(attempt), burn=True, kind="mismatch", reason=reason) == "failed"

    def record(self, sample: Sample, reason: str, attempt: int = 0, *, dies: bool = False) -> list[Line]:
        """The sample's record job; a writer that dies does not mark it in Redis."""
        record = Record(
            ordinal=sample.ordinal,
            sample=sample.name,
            status="failed",
            reason=reason,
            request=str(sample.request(attempt)),
            tokens=len(sample.token_ids),
            mask=sample.mask,
        )
        lines = self.store.record([record], AT)
        if not dies:
            self.bus.runs.mark_done(RUN, lines)
        return lines

    def row(self, sample: Sample, attempt: int = 0) -> None:
        """The sample's row and line are written, and Redis does not hear of it."""
        self.store.store(sample.job(attempt), sample.dump(self.folder, attempt), AT)


@pytest.fixture
def bench(bus: Bus, tmp_path: Path) -> Iterator[Bench]:
    opened = Bench(bus, tmp_path)
    yield opened
    opened.store.close()


def finish(bench: Bench) -> None:
    """All samples end: 1 and 3 fail for two reasons, the others are stored."""
    for sample, reason in ((SAMPLES[1], "nan"), (SAMPLES[3], "timeout")):
        bench.fail(sample, reason)
        bench.record(sample, reason)
    for ordinal in (0, 2, 4):
        bench.row(SAMPLES[ordinal])
    rebuild(bench.bus, bench.spec)
    assert view_of(bench.bus).state == "finished"


def feed(bus: Bus) -> list[int]:
    """Everything from the cursor on is fed; gives what is pending."""
    assert bus.runs.feed(RUN, view_of(bus).cursor, [""] * TOTAL) == TOTAL
    return bus.runs.pending(RUN, 100)


def test_the_failed_samples_of_a_finished_run_and_no_others_are_extracted_again(bench: Bench) -> None:
    finish(bench)
    assert view_of(bench.bus).failed_by == {"nan": 1, "timeout": 1}
    assert retry_failed(bench.bus, bench.spec) == {"nan": 1, "timeout": 1}
    view = view_of(bench.bus)
    assert (view.state, view.finished_at, view.cursor) == ("active", None, 1)
    assert (view.stored, view.failed, view.open, view.failed_by) == (3, 0, 2, {})
    assert bench.bus.redis.exists(keys.done(RUN), keys.failed(RUN), keys.dead(RUN)) == 3
    for key in (keys.run(RUN), keys.done(RUN), keys.failed(RUN), keys.dead(RUN)):
        assert bench.bus.redis.ttl(key) == -1, "a run that goes on does not expire"
    assert view.window.since == view.verdicts, "what went wrong before pauses the run no more"
    assert feed(bench.bus) == [1, 3]
    for ordinal in (1, 3):
        bench.fail(SAMPLES[ordinal], "again", attempt=1)  # they have all their attempts again


def test_failed_samples_are_tried_again_while_the_run_goes_on(bench: Bench) -> None:
    bench.fail(SAMPLES[1], "nan")
    bench.record(SAMPLES[1], "nan")
    assert retry_failed(bench.bus, bench.spec) == {"nan": 1}
    assert feed(bench.bus) == [0, 2, 3, 4, 1]


def test_a_run_without_failed_samples_is_left_as_it_is(bench: Bench) -> None:
    before = view_of(bench.bus)
    assert retry_failed(bench.bus, bench.spec) == {}
    assert view_of(bench.bus) == before


def test_no_rebuild_closes_a_sample_that_is_tried_again_by_its_old_line(bench: Bench) -> None:
    finish(bench)
    retry_failed(bench.bus, bench.spec)
    for _ in range(2):  # before it is fed, and after
        assert rebuild(bench.bus, bench.spec) == 0
        assert (view_of(bench.bus).state, view_of(bench.bus).failed) == ("active", 0)
        assert feed(bench.bus) == [1, 3]
    assert bench.record(SAMPLES[1], "nan")[0].reason == "nan", "a record job that comes late"
    assert rebuild(bench.bus, bench.spec, same_folder=True) == 0
    assert view_of(bench.bus).pending == 2


def test_asked_twice_the_samples_are_tried_again_once(bench: Bench) -> None:
    finish(bench)
    for _ in range(2):
        assert retry_failed(bench.bus, bench.spec) == {"nan": 1, "timeout": 1}
    assert view_of(bench.bus).open == 2
    assert feed(bench.bus) == [1, 3]
    assert retry_failed(bench.bus, bench.spec) == {"nan": 1, "timeout": 1}
    assert bench.bus.runs.pending(RUN, 100) == [1, 3]
    assert view_of(bench.bus).cursor == TOTAL, "nothing is fed again for a sample that is tried again already"


def test_a_sample_that_fails_again_is_closed_by_its_new_line_with_its_new_reason(bench: Bench) -> None:
    finish(bench)
    retry_failed(bench.bus, bench.spec)
    feed(bench.bus)
    for ordinal, reason in ((1, "no_dump"), (3, "nan")):
        bench.fail(SAMPLES[ordinal], reason, attempt=1)
    assert rebuild(bench.bus, bench.spec) == 0, "it has failed again, and its line is not written yet"
    for ordinal, reason in ((1, "no_dump"), (3, "nan")):
        bench.record(SAMPLES[ordinal], reason, attempt=1)
    assert (view_of(bench.bus).state, view_of(bench.bus).failed_by) == ("finished", {"nan": 1, "no_dump": 1})
    # And so says a Redis that knows nothing but the folder, and both go once more.
    bench.bus.redis.flushall()
    rebuild(bench.bus, bench.spec)
    assert (view_of(bench.bus).state, view_of(bench.bus).failed_by) == ("finished", {"nan": 1, "no_dump": 1})
    assert retry_failed(bench.bus, bench.spec) == {"nan": 1, "no_dump": 1}
    assert view_of(bench.bus).failed_by == {}


def test_a_line_that_was_written_but_not_marked_closes_the_sample_at_the_next_rebuild(bench: Bench) -> None:
    finish(bench)
    retry_failed(bench.bus, bench.spec)
    feed(bench.bus)
    bench.fail(SAMPLES[1], "no_dump", attempt=1)
    bench.fail(SAMPLES[3], "no_dump", attempt=1)
    for ordinal in (1, 3):
        bench.record(SAMPLES[ordinal], "no_dump", attempt=1, dies=True)
    assert rebuild(bench.bus, bench.spec) == 2
    assert view_of(bench.bus).failed_by == {"no_dump": 2}


def test_what_is_stored_in_the_end_is_stored_for_good(bench: Bench) -> None:
    finish(bench)
    retry_failed(bench.bus, bench.spec)
    feed(bench.bus)
    for ordinal in (1, 3):
        sample = SAMPLES[ordinal]
        assert bench.bus.requests.claim(RUN, SITE.site, SITE.boot, [sample.opened(1)]) == ["claimed"]
        assert bench.bus.requests.capture(sample.request(1), SITE.site, 9, IDENTITY).outcome == "captured"
        bench.row(sample, attempt=1)
        assert bench.bus.requests.stored(sample.request(1), SITE.site, 9) == "stored"
    for _ in range(2):
        view = view_of(bench.bus)
        assert (view.state, view.stored, view.failed, view.failed_by) == ("finished", TOTAL, 0, {})
        assert retry_failed(bench.bus, bench.spec) == {}
        bench.bus.redis.flushall()
        assert rebuild(bench.bus, bench.spec) == TOTAL


def test_a_row_that_came_after_its_sample_was_given_up_takes_the_failure_back_at_once(bench: Bench) -> None:
    finish(bench)
    bench.row(SAMPLES[3])
    for again in ("stored", "again"):
        assert bench.bus.requests.stored(SAMPLES[3].request(), SITE.site, 9) == again
        view = view_of(bench.bus)
        assert (view.state, view.stored, view.failed, view.failed_by) == ("finished", 4, 1, {"nan": 1})
    assert rebuild(bench.bus, bench.spec) == 0
    assert retry_failed(bench.bus, bench.spec) == {"nan": 1}


@pytest.mark.parametrize("status", ["stored", "rejected"])
def test_a_line_that_says_more_than_a_failure_is_learnt_of_a_sample_that_was_given_up(
    bench: Bench, status: Literal["stored", "rejected"]
) -> None:
    finish(bench)
    with (bench.output / "manifest" / "other.jsonl").open("wb") as segment:
        segment.write(make_line(3, status, "" if status == "stored" else "too_long").encode())
    assert rebuild(bench.bus, bench.spec) == 1
    view = view_of(bench.bus)
    assert (view.state, view.open, view.failed_by) == ("finished", 0, {"nan": 1})
    assert (view.stored, view.rejected) == ((4, 0) if status == "stored" else (3, 1))
    assert rebuild(bench.bus, bench.spec) == 0


def test_the_counts_by_reason_stay_right_when_the_newest_line_has_another_reason(bench: Bench) -> None:
    """Redis was set back to before the retry, of which the manifest has the end."""
    finish(bench)
    bench.record(SAMPLES[1], "no_dump", attempt=1, dies=True)
    rebuild(bench.bus, bench.spec)
    assert view_of(bench.bus).failed_by == {"nan": 1, "timeout": 1}
    assert retry_failed(bench.bus, bench.spec).total() == 2
    assert (view_of(bench.bus).failed, view_of(bench.bus).failed_by) == (0, {})
    feed(bench.bus)
    for ordinal in (1, 3):
        bench.fail(SAMPLES[ordinal], "no_dump", attempt=2)
        bench.record(SAMPLES[ordinal], "no_dump", attempt=2)
    assert (view_of(bench.bus).failed, view_of(bench.bus).failed_by) == (2, {"no_dump": 2})


@pytest.mark.parametrize("before", [0, 1])
def test_samples_whose_lines_are_not_written_yet_go_again_too_and_no_late_line_closes_them(
    bench: Bench, before: int
) -> None:
    """They failed for the first time, or again after they were tried again."""
    if before:
        finish(bench)
        retry_failed(bench.bus, bench.spec)
        feed(bench.bus)
    bench.fail(SAMPLES[1], "timeout", attempt=before)
    bench.fail(SAMPLES[3], "no_dump", attempt=before)
    bench.record(SAMPLES[3], "no_dump", attempt=before, dies=True)
    for _ in range(2):
        assert retry_failed(bench.bus, bench.spec) == {"timeout": 1, "no_dump": 1}
        assert set(bench.bus.runs.pending(RUN, 100)) >= {1, 3}
    assert bench.bus.requests.reap_run(RUN) == ([], []), "they wait for no line any more"
    for ordinal, reason in ((1, "timeout"), (3, "no_dump")):
        bench.record(SAMPLES[ordinal], reason, attempt=before)
    rebuild(bench.bus, bench.spec)
    assert (view_of(bench.bus).failed, view_of(bench.bus).failed_by) == (0, {})
    bench.fail(SAMPLES[1], "nan", attempt=2)  # they have all their attempts again
    bench.record(SAMPLES[1], "nan", attempt=2)
    assert view_of(bench.bus).failed_by == {"nan": 1}


def test_failures_of_which_an_earlier_version_kept_no_note_go_again(bench: Bench) -> None:
    finish(bench)
    bench.bus.redis.delete(keys.failed(RUN))
    assert rebuild(bench.bus, bench.spec) == 0
    assert bench.bus.redis.ttl(keys.failed(RUN)) > 0, "it expires with its run"
    assert retry_failed(bench.bus, bench.spec) == {"nan": 1, "timeout": 1}
    assert (view_of(bench.bus).failed, view_of(bench.bus).failed_by) == (0, {})


def test_no_sample_becomes_a_failure_that_was_not_counted_as_one(bench: Bench) -> None:
    """One may be stored after the manifest was read."""
    finish(bench)
    read = [make_line(ordinal, "failed", reason) for ordinal, reason in ((0, "nan"), (1, "nan"), (3, "timeout"))]
    bench.bus.runs.note_failed(RUN, read)
    assert sorted(bench.bus.redis.hkeys(keys.failed(RUN))) == [b"1", b"3"]


def test_a_redis_that_was_set_back_over_a_retry_learns_what_was_stored_since(tmp_path: Path) -> None:
    data, copy = tmp_path / "redis", tmp_path / "copy"
    with ValkeyServer(data, aof=True) as server:
        bus = Bus.open(server.url)
        bench = Bench(bus, tmp_path)
        finish(bench)
        server.stop()
        copytree(data, copy)
        server.start()
        with DispatcherProcess(tmp_path, server.url, reap_seconds=2) as dispatcher:
            dispatcher.wait_for("dispatching")
            retry_failed(bus, bench.spec)
            wait_until(lambda: view_of(bus).fed == 2, what="both to be fed")
            bench.row(SAMPLES[1], attempt=1)
            server.stop()
            rmtree(data)
            copytree(copy, data)
            server.start()
            wait_until(lambda: view_of(bus).stored == 4, what="what was stored to be learnt")
        assert (view_of(bus).state, view_of(bus).failed_by) == ("finished", {"timeout": 1})
        bench.store.close()
        bus.close()


def test_a_paused_run_stays_paused(bench: Bench) -> None:
    bench.fail(SAMPLES[1], "nan")
    bench.record(SAMPLES[1], "nan")
    bench.bus.runs.pause(RUN, "by hand")
    assert retry_failed(bench.bus, bench.spec) == {"nan": 1}
    assert (view_of(bench.bus).state, view_of(bench.bus).reason) == ("paused", "by hand")


def test_the_feed_passes_over_what_is_done_at_once(bus: Bus, tmp_path: Path) -> None:
    """Of a large run's few failed samples each is fed as soon as the one before it."""
    total = 3000
    spec = write_inputs(tmp_path / "dataset", SAMPLES[:1], rejected=total - 1)
    rebuild(bus, spec)
    bus.redis.setrange(keys.done(RUN), 0, b"\xff" * 300)  # 2400 samples
    bus.redis.setbit(keys.done(RUN), 700, 0)
    assert bus.runs.feed(RUN, 0, [""]) == 700
    assert bus.runs.feed(RUN, 700, [""]) == 2400
    assert bus.runs.pending(RUN, 10) == [700]
    bus.redis.setrange(keys.done(RUN), 300, b"\xff" * 75)
    assert bus.runs.feed(RUN, 2400, [""]) == total

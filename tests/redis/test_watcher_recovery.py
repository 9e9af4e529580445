"""What the judge makes good: crashes, leases, an absent Redis, and a quarantine that is full."""

from __future__ import annotations

import os

import pytest

from headrace.dumps import dump_layout
from headrace.metrics import VERDICTS
from headrace.verdicts import Reason
from tests.support.desk import SAMPLE, Desk
from tests.support.stores import HIDDEN, RUN, make_sample
from tests.support.watched import claim, make_site

pytestmark = pytest.mark.redis


def test_a_crash_between_capture_and_queue_is_made_good(desk: Desk) -> None:
    claim(desk.bus, desk.site, [SAMPLE])
    desk.dump()
    desk.look()
    desk.bus.jobs.delete_queue(desk.site)  # as if the first watcher had died before it queued
    desk.judge = desk.new_judge()
    desk.look()
    desk.look()
    assert [job.job for job in desk.jobs()] == [1]
    view = desk.bus.runs.get(RUN)
    assert view is not None
    assert view.verdicts == 1


def test_a_crash_between_end_and_quarantine_counts_once(desk: Desk) -> None:
    claim(desk.bus, desk.site, [SAMPLE])
    desk.bus.requests.end(SAMPLE.request(), burn=True, kind="mismatch", reason=Reason.LAYERS)
    path = desk.dump(boundaries=(1, 2, 3))
    desk.look()
    assert not path.exists()
    view = desk.bus.runs.get(RUN)
    assert view is not None
    assert (view.verdicts, view.mismatches, view.pending) == (1, 1, 8)


def test_a_captured_dump_is_held_and_judged_again_when_its_lease_is_gone(desk: Desk) -> None:
    claim(desk.bus, desk.site, [SAMPLE])
    desk.dump()
    desk.look()
    desk.judge.hold(desk.folder.scan())
    desk.look()
    assert len(desk.jobs()) == 1
    assert desk.bus.requests.end(SAMPLE.request(), burn=True, kind="error", reason="dump_gone") == "pending"
    desk.judge.hold(desk.folder.scan())
    desk.look()
    assert desk.bus.requests.begin_store(SAMPLE.request(), desk.jobs()[-1].job, desk.site) == "go"


def test_a_dump_that_the_writer_took_is_forgotten(desk: Desk) -> None:
    claim(desk.bus, desk.site, [SAMPLE])
    path = desk.dump()
    desk.look()
    desk.bus.requests.stored(SAMPLE.request(), desk.site, 100)
    path.unlink()
    desk.look()
    desk.judge.hold(desk.folder.scan())
    assert desk.folder.scan().dumps == ()


def test_a_capture_adds_only_bytes_that_were_not_measured(desk: Desk) -> None:
    samples = [make_sample(0), make_sample(1)]
    claim(desk.bus, desk.site, samples)
    desk.dump(samples[0])
    listing = desk.folder.scan()
    desk.bus.sites.register(make_site(desk.site, dump_bytes=listing.nbytes), 60)
    desk.judge.measured(listing)
    desk.look()
    measured = desk.bus.sites.get(desk.site)
    assert measured is not None
    assert measured.dump_bytes == listing.nbytes
    desk.dump(samples[1])
    now = desk.folder.scan().nbytes
    desk.look()
    added = desk.bus.sites.get(desk.site)
    assert added is not None
    assert added.dump_bytes == now > listing.nbytes
    assert desk.bus.sites.load(added).promised_bytes == 0


def test_everything_is_judged_again_after_redis_was_away(desk: Desk) -> None:
    claim(desk.bus, desk.site, [SAMPLE])
    desk.dump()
    desk.look()
    desk.bus.jobs.delete_queue(desk.site)  # what a server that lost its last second may have forgotten
    verdicts = VERDICTS.labels(RUN)._value.get()
    desk.look()
    assert desk.jobs() == []
    desk.judge.reopen()
    desk.look()
    assert [job.job for job in desk.jobs()] == [1]
    assert VERDICTS.labels(RUN)._value.get() == verdicts


def test_a_quarantine_without_room_keeps_the_verdict_in_the_log_only(desk: Desk) -> None:
    (desk.scratch / "quarantine").write_text("a file in its place")
    claim(desk.bus, desk.site, [SAMPLE])
    path = desk.dump(boundaries=(1, 2, 3))
    desk.look()
    assert not path.exists()
    assert desk.bus.runs.dead(RUN)[0][2] == Reason.LAYERS


def test_the_quarantine_is_bounded_and_the_oldest_goes_first(desk: Desk) -> None:
    samples = [make_sample(ordinal, tokens=100) for ordinal in range(4)]
    claim(desk.bus, desk.site, samples)
    size = desk.dump(samples[0]).stat().st_size
    (desk.folder.path / f"{samples[0].request()}.safetensors").unlink()
    desk.judge = desk.new_judge(most_bytes=2 * size + size // 2)
    for age, sample in enumerate(samples):
        desk.dump(sample, boundaries=(1, 2, 3))
        desk.look()
        os.utime(desk.scratch / "quarantine" / str(sample.request()), (age, age))
    kept = sorted(path.name for path in (desk.scratch / "quarantine").iterdir())
    assert kept == sorted(str(sample.request()) for sample in samples[2:])


def test_a_dump_larger_than_the_quarantine_leaves_its_beginning(desk: Desk) -> None:
    claim(desk.bus, desk.site, [SAMPLE])
    desk.judge = desk.new_judge(most_bytes=700)
    desk.dump(boundaries=(1, 2, 3))
    desk.look()
    kept = desk.scratch / "quarantine" / str(SAMPLE.request())
    assert (kept / "dump.safetensors").stat().st_size == 700
    assert desk.kept(SAMPLE.request())["reason"] == Reason.LAYERS


def test_a_spec_of_a_newer_headrace_leaves_the_dump_alone(desk: Desk) -> None:
    claim(desk.bus, desk.site, [SAMPLE])
    desk.bus.redis.hset(f"hr:run:{RUN}", "spec", b'{"schema": 99}')
    path = desk.dump()
    desk.look()
    assert path.exists()
    assert desk.jobs() == []
    assert not (desk.scratch / "quarantine").exists()


def test_the_layout_of_a_dump_is_what_these_tests_think() -> None:
    assert dump_layout(12, 3, HIDDEN, "BF16")["aux"].shape == (12, 3 * HIDDEN)

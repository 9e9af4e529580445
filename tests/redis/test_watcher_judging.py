from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from headrace.bus import Bus
from headrace.bus.jobs import Serializer
from headrace.dumps import LOST_SUFFIX, Stats, dump_layout
from headrace.ids import RequestId
from headrace.messages import StoreJob, decode
from headrace.metrics import LOSSES_TOTAL, MATCH_FAILURES, VERDICTS
from headrace.quarantine import Quarantine
from headrace.verdicts import LOST_REASONS, Reason
from headrace_watcher.folder import DumpFolder
from headrace_watcher.judging import Judge
from tests.support.dumps import ENGINE, WEIGHTS, make_dump
from tests.support.stores import BOUNDARIES, HIDDEN, RUN, Sample, make_sample, make_spec
from tests.support.watched import claim, lose, make_site, publish

pytestmark = pytest.mark.redis

GRACE, RETRY = 60.0, 1.0
SAMPLE = make_sample(0)
LAYERS = (*(str(boundary) for boundary in BOUNDARIES), "final")


def stats(**changes: Any) -> tuple[Stats, ...]:
    return tuple(replace(Stats(layer=name, not_finite=0, norm_min=1.0, norm_max=2.0), **changes) for name in LAYERS)


class Desk:
    """A judge, its folder, and a run whose first samples are in flight."""

    def __init__(self, bus: Bus, folder: DumpFolder, scratch: Path) -> None:
        self.bus, self.folder, self.scratch = bus, folder, scratch
        self.site = folder.site
        self.now = 1000.0
        self.judge = self.new_judge()
        spec = make_spec(scratch / "out", total=8)
        bus.runs.create(spec)
        bus.runs.activate(RUN)
        bus.runs.feed(RUN, 0, [""] * 8)
        bus.sites.register(make_site(self.site), 60)

    def new_judge(self, most_bytes: int = 1 << 20) -> Judge:
        quarantine = Quarantine(self.scratch / "quarantine", most_bytes)
        return Judge(self.bus, self.folder, quarantine, grace=GRACE, retry=RETRY)

    def look(self, seconds: float = 0.0) -> None:
        """One pass over the folder, so much later."""
        self.now += seconds
        listing = self.folder.scan()
        self.judge.begin()
        for entry in listing.dumps:
            self.judge.dump(entry, self.now)
        for entry in listing.notices:
            self.judge.notice(entry, self.now)
        self.judge.forget(listing)

    def dump(self, sample: Sample = SAMPLE, attempt: int = 0, **changes: Any) -> Path:
        return publish(self.folder.path, sample.request(attempt), sample.token_ids, **changes)

    def jobs(self) -> list[StoreJob]:
        found = []
        for job in self.bus.jobs.rq_queue(self.site).get_jobs():
            message = decode(Serializer.loads(job.data)[2][0])
            assert isinstance(message, StoreJob)
            found.append(message)
        return found

    def kept(self, request: RequestId) -> dict[str, str]:
        verdict: dict[str, str] = json.loads((self.scratch / "quarantine" / str(request) / "verdict.json").read_text())
        return verdict


@pytest.fixture
def desk(bus: Bus, tmp_path: Path) -> Iterator[Desk]:
    with DumpFolder.open(tmp_path / "dumps") as folder:
        yield Desk(bus, folder, tmp_path)


@pytest.fixture
def failures() -> Callable[[Reason], float]:
    """How often a reason was counted since the test began."""
    begun = {reason: MATCH_FAILURES.labels(RUN, reason)._value.get() for reason in Reason}
    return lambda reason: MATCH_FAILURES.labels(RUN, reason)._value.get() - begun[reason]


def test_a_match_is_captured_and_queued_once(desk: Desk) -> None:
    claim(desk.bus, desk.site, [SAMPLE])
    path = desk.dump()
    verdicts = VERDICTS.labels(RUN)._value.get()
    desk.look()
    desk.look(5)
    expected = StoreJob(
        request=str(SAMPLE.request()),
        sample=SAMPLE.name,
        job=1,
        mask=SAMPLE.mask,
        engine=ENGINE,
        weight_version=WEIGHTS,
    )
    assert desk.jobs() == [expected]
    assert path.exists()
    assert VERDICTS.labels(RUN)._value.get() == verdicts + 1
    view = desk.bus.runs.get(RUN)
    assert view is not None
    assert (view.verdicts, view.mismatches, view.in_flight) == (1, 0, 0)


def test_a_match_whose_attempt_lapsed_wins_all_the_same(desk: Desk) -> None:
    claim(desk.bus, desk.site, [SAMPLE])
    assert desk.bus.requests.end(SAMPLE.request(), burn=True, kind="error", reason="lapsed") == "pending"
    desk.dump()
    desk.look()
    assert [job.request for job in desk.jobs()] == [str(SAMPLE.request())]


REFUSALS: list[tuple[str, dict[str, Any], Reason]] = [
    ("other ids", {}, Reason.TOKEN_CONTENT),
    ("named for another", {"request": str(SAMPLE.request(1))}, Reason.TOKEN_CONTENT),
    ("tokens", {"tokens": 11}, Reason.TOKEN_COUNT),
    ("boundaries", {"boundaries": (1, 4, 6)}, Reason.LAYERS),
    ("post norm", {"final_state": "post_norm"}, Reason.LAYERS),
    ("nan", {"stats": stats(not_finite=3)}, Reason.NOT_FINITE),
    ("infinite norm", {"stats": stats(norm_max=float("inf"))}, Reason.NOT_FINITE),
    ("zero row", {"stats": stats(norm_min=0.0)}, Reason.DEGENERATE),
    ("no stats", {"stats": ()}, Reason.UNREADABLE),
    ("newer schema", {"schema": 2}, Reason.UNREADABLE),
    ("no checksum", {"checksum": "md5"}, Reason.UNREADABLE),
]


@pytest.mark.parametrize(("what", "changes", "reason"), REFUSALS, ids=[what for what, _, _ in REFUSALS])
def test_a_refused_dump_ends_its_attempt_and_goes_to_quarantine(
    desk: Desk, failures: Callable[[Reason], float], what: str, changes: dict[str, Any], reason: Reason
) -> None:
    claim(desk.bus, desk.site, [SAMPLE])
    ids = [9] * 12 if what == "other ids" else SAMPLE.token_ids
    path = publish(desk.folder.path, SAMPLE.request(), ids, **changes)
    desk.look()
    desk.look(5)
    assert not path.exists()
    assert desk.jobs() == []
    verdict = desk.kept(SAMPLE.request())
    assert (verdict["reason"], verdict["request"], verdict["site"]) == (reason, str(SAMPLE.request()), desk.site)
    assert verdict["detail"]
    view = desk.bus.runs.get(RUN)
    assert view is not None
    assert (view.verdicts, view.mismatches, view.reasons) == (1, 1, {reason: 1})
    assert view.in_flight == 0
    assert failures(reason) == 1
    assert desk.bus.runs.dead(RUN) == [(str(SAMPLE.request()), 1, reason)]


def test_another_width_is_refused_by_its_shape(desk: Desk) -> None:
    claim(desk.bus, desk.site, [SAMPLE])
    make_dump(desk.folder.path, SAMPLE.request(), SAMPLE.token_ids, BOUNDARIES, HIDDEN // 2)
    desk.look()
    assert desk.kept(SAMPLE.request())["reason"] == Reason.SHAPE


def test_too_few_rows_are_refused_by_their_count(desk: Desk) -> None:
    claim(desk.bus, desk.site, [SAMPLE])
    make_dump(desk.folder.path, SAMPLE.request(), SAMPLE.token_ids[:5], BOUNDARIES, HIDDEN)
    desk.look()
    assert desk.kept(SAMPLE.request())["reason"] == Reason.TOKEN_COUNT


@pytest.mark.parametrize("data", [b"", b"torn", b"\xff" * 64, b"\x02\x00\x00\x00\x00\x00\x00\x00[]"])
def test_a_torn_file_is_unreadable(desk: Desk, data: bytes) -> None:
    claim(desk.bus, desk.site, [SAMPLE])
    (desk.folder.path / f"{SAMPLE.request()}.safetensors").write_bytes(data)
    desk.look()
    assert desk.kept(SAMPLE.request())["reason"] == Reason.UNREADABLE


def test_a_file_that_was_cut_is_unreadable(desk: Desk) -> None:
    claim(desk.bus, desk.site, [SAMPLE])
    path = make_dump(desk.folder.path, SAMPLE.request(), SAMPLE.token_ids, BOUNDARIES, HIDDEN)
    os.truncate(path, path.stat().st_size - 1)
    desk.look()
    assert desk.kept(SAMPLE.request())["reason"] == Reason.UNREADABLE


@pytest.mark.parametrize(
    ("changes", "reason"),
    [({"engine": "another"}, Reason.ENGINE_CHANGED), ({"weight_version": "v2"}, Reason.WEIGHTS_CHANGED)],
)
def test_rows_of_another_engine_than_the_first_are_refused(desk: Desk, changes: dict[str, Any], reason: Reason) -> None:
    other = make_sample(1)
    claim(desk.bus, desk.site, [SAMPLE, other])
    desk.dump()
    desk.look()
    desk.dump(other, **changes)
    desk.look()
    assert desk.kept(other.request())["reason"] == reason
    assert len(desk.jobs()) == 1


def test_a_run_that_nobody_knows_is_a_mismatch_after_the_grace(desk: Desk, failures: Callable[[Reason], float]) -> None:
    request = RequestId.make("nowhere", 3, "nonce000", SAMPLE.token_ids)
    path = publish(desk.folder.path, request, SAMPLE.token_ids)
    desk.look()
    desk.look(GRACE - 1)
    assert path.exists()
    desk.look(1)
    assert not path.exists()
    assert desk.kept(request)["reason"] == Reason.UNKNOWN_RUN
    assert MATCH_FAILURES.labels("nowhere", Reason.UNKNOWN_RUN)._value.get() == 1
    assert failures(Reason.UNKNOWN_RUN) == 0
    assert desk.bus.runs.names() == [RUN]


def test_a_run_that_is_known_in_time_gets_its_dump(desk: Desk) -> None:
    sample = make_sample(1)
    request = RequestId.make("late", sample.ordinal, "nonce000", sample.token_ids)
    path = publish(desk.folder.path, request, sample.token_ids)
    desk.look()
    desk.bus.runs.create(make_spec(desk.scratch / "late", run="late", total=8))
    desk.look(RETRY)
    desk.look(GRACE)
    assert not path.exists()
    assert not (desk.scratch / "quarantine").exists()


@pytest.mark.parametrize("state", ["unknown", "done", "failed"])
def test_a_dump_that_nobody_waits_for_is_swept_and_counts_as_neither(
    desk: Desk, failures: Callable[[Reason], float], state: str
) -> None:
    request = SAMPLE.request()
    if state != "unknown":
        claim(desk.bus, desk.site, [SAMPLE])
    if state == "done":
        desk.bus.requests.stored(request, desk.site, 100)
    if state == "failed":
        for attempt in range(3):
            if attempt:
                claim(desk.bus, desk.site, [SAMPLE], attempt)
            desk.bus.requests.end(SAMPLE.request(attempt), burn=True, kind="error", reason="lapsed")
    path = desk.dump()
    desk.look()
    desk.look(GRACE - 1)
    assert path.exists()
    desk.look(1)
    assert not path.exists()
    assert desk.jobs() == []
    assert sum(failures(reason) for reason in Reason) == 0
    view = desk.bus.runs.get(RUN)
    assert view is not None
    assert view.verdicts == 0


def test_a_refused_dump_of_an_unknown_request_counts_as_neither(
    desk: Desk, failures: Callable[[Reason], float]
) -> None:
    desk.dump(boundaries=(1, 2, 3))
    desk.look()
    assert desk.kept(SAMPLE.request())["reason"] == Reason.LAYERS
    assert failures(Reason.LAYERS) == 0


def test_the_second_dump_of_a_sample_goes_and_counts_as_neither(
    desk: Desk, failures: Callable[[Reason], float]
) -> None:
    claim(desk.bus, desk.site, [SAMPLE])
    desk.bus.requests.end(SAMPLE.request(), burn=True, kind="error", reason="lapsed")
    claim(desk.bus, desk.site, [SAMPLE], attempt=1)
    first, verdicts = desk.dump(attempt=1), VERDICTS.labels(RUN)._value.get()
    desk.look()
    second = desk.dump()
    desk.look()
    assert first.exists()
    assert not second.exists()
    assert [job.request for job in desk.jobs()] == [str(SAMPLE.request(1))]
    assert VERDICTS.labels(RUN)._value.get() == verdicts + 1
    assert sum(failures(reason) for reason in Reason) == 0


@pytest.mark.parametrize("reason", sorted(LOST_REASONS))
def test_a_notice_ends_the_attempt_by_its_reason(
    desk: Desk, failures: Callable[[Reason], float], reason: Reason
) -> None:
    claim(desk.bus, desk.site, [SAMPLE])
    losses = LOSSES_TOTAL.labels(reason)._value.get()
    path = lose(desk.folder.path, SAMPLE.request(), reason)
    desk.look()
    assert not path.exists()
    view = desk.bus.runs.get(RUN)
    assert view is not None
    assert (view.pending, view.in_flight) == (8, 0)
    mismatch = reason in (Reason.PREFIX_CACHED, Reason.INCOMPLETE)
    assert view.mismatches == int(mismatch)
    assert failures(reason) == int(mismatch)
    assert LOSSES_TOTAL.labels(reason)._value.get() == losses + int(not mismatch)
    burnt = [] if reason is Reason.NO_ROOM else [(str(SAMPLE.request()), 1, reason)]
    assert desk.bus.runs.dead(RUN) == burnt


@pytest.mark.parametrize(
    "data", [b"", b"[]", b'{"schema": 9}', b'{"schema": 1}', b"\xff\xfe", b'{"schema": 1, "reason": "layers"}']
)
def test_a_notice_that_says_nothing_is_an_internal_loss(desk: Desk, data: bytes) -> None:
    claim(desk.bus, desk.site, [SAMPLE])
    path = desk.folder.path / f"{SAMPLE.request()}{LOST_SUFFIX}"
    path.write_bytes(data)
    desk.look()
    assert not path.exists()
    assert [reason for _, _, reason in desk.bus.runs.dead(RUN)] == [Reason.INTERNAL]


@pytest.mark.parametrize("reason", ["brand_new", "layers", "", "duplicate"])
def test_a_notice_with_a_reason_that_no_plugin_gives_is_an_internal_loss(desk: Desk, reason: str) -> None:
    claim(desk.bus, desk.site, [SAMPLE])
    lose(desk.folder.path, SAMPLE.request(), reason)
    desk.look()
    assert [reason for _, _, reason in desk.bus.runs.dead(RUN)] == [Reason.INTERNAL]


def test_a_notice_beside_a_captured_dump_does_not_take_the_sample_back(desk: Desk) -> None:
    claim(desk.bus, desk.site, [SAMPLE])
    desk.dump()
    notice = lose(desk.folder.path, SAMPLE.request(), "evicted")
    desk.look()
    assert not notice.exists()
    assert desk.bus.requests.begin_store(SAMPLE.request(), 1, desk.site) == "go"


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
    samples = [make_sample(ordinal) for ordinal in range(4)]
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

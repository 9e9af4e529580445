"""What the reaper does when leases lapse, sites die, and Redis is another one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from headrace.bus import Bus, keys
from headrace.bus.values import DESTINATION_FULL, Attempt
from headrace.messages import RecordJob, StoreJob, decode
from headrace_dispatcher.catalog import Catalog
from headrace_dispatcher.inputs import RejectedSample
from headrace_dispatcher.inputs import Sample as InputSample
from headrace_dispatcher.inputs_writer import InputsWriter
from headrace_dispatcher.reaper import Reaper
from headrace_dispatcher.rebuild import rebuild
from tests.redis.test_writer_handler import IDENTITY, SITE
from tests.support.stores import RUN, Sample, make_sample, make_spec

pytestmark = pytest.mark.redis

TOTAL = 5


@pytest.fixture
def samples() -> list[Sample]:
    return [make_sample(ordinal) for ordinal in range(TOTAL)]


@pytest.fixture
def reaper(bus: Bus, tmp_path: Path, samples: list[Sample]) -> Iterator[Reaper]:
    """A reaper over a run of five samples, the last one rejected, all fed."""
    spec = make_spec(tmp_path / "dataset", total=TOTAL, max_attempts=2)
    with InputsWriter(tmp_path / "dataset") as writer:
        for sample in samples[:-1]:
            writer.add(InputSample(ordinal=sample.ordinal, sample=sample.name, ids=sample.token_ids, mask=sample.mask))
        writer.add(RejectedSample(ordinal=TOTAL - 1, sample="bad", reason="too_long", detail="9000 tokens"))
        writer.publish(spec)
    rebuild(bus, spec)
    bus.sites.register(SITE, 60)
    bus.runs.feed(RUN, 0, [""] * (TOTAL - 1) + ["too_long"])
    catalog = Catalog()
    view = bus.runs.get(RUN)
    assert view is not None
    catalog.serve(view)
    yield Reaper(bus, catalog)
    catalog.close()


def claim(bus: Bus, sample: Sample, attempt: int = 0) -> None:
    request = sample.request(attempt)
    opened = Attempt(
        ordinal=sample.ordinal,
        request=str(request),
        tokens=request.tokens,
        dump_bytes=1000,
        sample=sample.name,
        mask=sample.mask,
    )
    assert bus.requests.claim(RUN, "s1", "boot", [opened]) == ["claimed"]


def lapse(bus: Bus, key: str) -> None:
    """Every lease of this set ended long ago."""
    for member in bus.redis.zrange(key, 0, -1):
        bus.redis.zadd(key, {member: 1})


def jobs(bus: Bus) -> list[StoreJob | RecordJob]:
    return [decode(job.args[0]) for job in bus.jobs.rq_queue("s1").jobs]


def test_a_lapsed_attempt_goes_back_and_the_last_one_fails_with_a_line_to_write(
    bus: Bus, reaper: Reaper, samples: list[Sample]
) -> None:
    for attempt in range(2):
        claim(bus, samples[0], attempt)
        lapse(bus, keys.in_flight(RUN))
        reaper.pass_once()
    assert bus.sites.load(SITE).requests == 0
    records = [record for job in jobs(bus) if isinstance(job, RecordJob) for record in job.records]
    assert {(record.ordinal, record.sample, record.status, record.reason) for record in records} == {
        (0, samples[0].name, "failed", "lapsed"),
        (TOTAL - 1, "bad", "rejected", "too_long"),
    }
    assert next(record.tokens for record in records if record.ordinal == 0) == len(samples[0].token_ids)


def test_an_answered_request_without_a_dump_says_so(bus: Bus, reaper: Reaper, samples: list[Sample]) -> None:
    claim(bus, samples[0])
    bus.requests.answered(RUN, str(samples[0].request()))
    lapse(bus, keys.in_flight(RUN))
    reaper.pass_once()
    view = bus.runs.get(RUN)
    assert view is not None
    assert view.reasons == {"no_dump": 1}
    assert 0 in bus.runs.pending(RUN, 10)


def test_a_lapsed_storing_lease_queues_the_next_job_at_the_same_site(
    bus: Bus, reaper: Reaper, samples: list[Sample]
) -> None:
    claim(bus, samples[1])
    bus.requests.capture(samples[1].request(), "s1", 1000, IDENTITY)
    lapse(bus, keys.storing("s1"))
    reaper.pass_once()
    (job,) = [job for job in jobs(bus) if isinstance(job, StoreJob)]
    assert job == samples[1].job(job=2)


def test_a_lapsed_captured_lease_wins_over_storing(bus: Bus, reaper: Reaper, samples: list[Sample]) -> None:
    claim(bus, samples[1])
    bus.requests.capture(samples[1].request(), "s1", 1000, IDENTITY)
    lapse(bus, keys.storing("s1"))
    lapse(bus, keys.captured("s1"))
    reaper.pass_once()
    assert not [job for job in jobs(bus) if isinstance(job, StoreJob)]
    assert 1 in bus.runs.pending(RUN, 10)


def test_a_dead_site_is_evicted_with_its_queue(bus: Bus, reaper: Reaper, samples: list[Sample]) -> None:
    claim(bus, samples[1])
    outcome = bus.requests.capture(samples[1].request(), "s1", 1000, IDENTITY)
    bus.jobs.queue_store("s1", samples[1].job(job=outcome.job))
    bus.sites.unregister("s1")
    reaper.pass_once()
    assert bus.sites.names() == ["s1"]  # its captured lease still holds
    lapse(bus, keys.captured("s1"))
    reaper.pass_once()
    reaper.pass_once()
    assert bus.sites.names() == []
    assert bus.jobs.depth("s1") == 0
    assert 1 in bus.runs.pending(RUN, 10)


def test_a_run_paused_by_a_full_destination_goes_on_when_there_is_room(bus: Bus, reaper: Reaper) -> None:
    bus.runs.pause(RUN, DESTINATION_FULL)
    reaper.pass_once()
    view = bus.runs.get(RUN)
    assert view is not None
    assert view.state == "active"


def test_a_run_paused_by_hand_stays_paused(bus: Bus, reaper: Reaper) -> None:
    bus.runs.pause(RUN, "by hand")
    reaper.pass_once()
    view = bus.runs.get(RUN)
    assert view is not None
    assert view.state == "paused"


def test_a_run_that_a_new_server_does_not_know_is_rebuilt(
    bus: Bus, reaper: Reaper, monkeypatch: pytest.MonkeyPatch
) -> None:
    reaper.pass_once()
    bus.redis.flushall()
    monkeypatch.setattr(type(bus), "server_run_id", lambda self: "another life")
    reaper.pass_once()
    view = bus.runs.get(RUN)
    assert view is not None
    assert (view.state, view.cursor, view.open) == ("active", 0, TOTAL)


def test_a_cancelled_run_stays_cancelled_when_redis_restarts(
    bus: Bus, reaper: Reaper, monkeypatch: pytest.MonkeyPatch
) -> None:
    reaper.pass_once()
    bus.runs.cancel(RUN)
    monkeypatch.setattr(type(bus), "server_run_id", lambda self: "another life")
    reaper.pass_once()
    view = bus.runs.get(RUN)
    assert view is not None
    assert view.state == "cancelled"


def test_a_run_whose_samples_are_damaged_is_paused_and_says_so(bus: Bus, reaper: Reaper, tmp_path: Path) -> None:
    path = tmp_path / "dataset" / "inputs" / "samples.jsonl"
    path.write_bytes(path.read_bytes().replace(b'"rejected"', b'"rejecte\\"'))
    reaper.pass_once()
    view = bus.runs.get(RUN)
    assert view is not None
    assert view.state == "paused"
    assert "inputs" in view.reason

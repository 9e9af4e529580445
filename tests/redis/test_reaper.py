"""What the reaper does when leases lapse, sites die, and Redis is another one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from prometheus_client import REGISTRY
from structlog.testing import capture_logs

from headrace.bus import Bus, keys
from headrace.bus.values import DESTINATION_FULL
from headrace.errors import RedisAway
from headrace.manifest import INPUTS_FOLDER
from headrace.messages import RecordJob, StoreJob, decode
from headrace_dispatcher.catalog import Catalog
from headrace_dispatcher.mismatches import MismatchLimit
from headrace_dispatcher.patience import Patience
from headrace_dispatcher.reaper import Reaper
from headrace_dispatcher.rebuild import rebuild
from tests.redis.test_writer_handler import IDENTITY, SITE
from tests.support.bus_values import make_line
from tests.support.dispatching import view_of, write_inputs, write_lines
from tests.support.server import ValkeyServer
from tests.support.stores import RUN, Sample, make_sample, make_spec
from tests.support.waiting import wait_until

pytestmark = pytest.mark.redis

TOTAL = 5
EAGER = Patience(wait=0, silence=3600)
NEVER = MismatchLimit(share=1, least=1)


@pytest.fixture
def samples() -> list[Sample]:
    return [make_sample(ordinal) for ordinal in range(TOTAL)]


@contextmanager
def reaping(
    bus: Bus,
    scratch: Path,
    samples: list[Sample],
    patience: Patience = EAGER,
    paused: str = "",
    rebuild_after: float = 3600,
    limit: MismatchLimit = NEVER,
) -> Iterator[Reaper]:
    """A reaper over a run of five samples, the last one rejected, all fed."""
    output = scratch / "dataset"
    if not (output / INPUTS_FOLDER).exists():
        write_inputs(output, samples[:-1], rejected=1)
    rebuild(bus, make_spec(output, total=TOTAL, max_attempts=2))
    bus.sites.register(SITE, 3600)
    bus.runs.feed(RUN, 0, [""] * (TOTAL - 1) + ["too_long"])
    if paused:
        bus.runs.pause(RUN, paused)
    catalog = Catalog()
    catalog.serve(view_of(bus))
    yield Reaper(bus, catalog, patience, limit, rebuild_after)
    catalog.close()


@pytest.fixture
def reaper(bus: Bus, tmp_path: Path, samples: list[Sample]) -> Iterator[Reaper]:
    with reaping(bus, tmp_path, samples) as opened:
        yield opened


def claim(bus: Bus, sample: Sample, attempt: int = 0) -> None:
    assert bus.requests.claim(RUN, "s1", "boot", [sample.opened(attempt)]) == ["claimed"]


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
    by_ordinal = {record.ordinal: record for record in records}
    assert (by_ordinal[0].tokens, by_ordinal[0].mask) == (len(samples[0].token_ids), samples[0].mask)
    assert by_ordinal[TOTAL - 1].mask == ()


def test_an_answered_request_without_a_dump_says_so(bus: Bus, reaper: Reaper, samples: list[Sample]) -> None:
    claim(bus, samples[0])
    bus.requests.answered(RUN, str(samples[0].request()))
    lapse(bus, keys.in_flight(RUN))
    reaper.pass_once()
    view = view_of(bus)
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


def test_a_run_that_ended_is_let_go_and_one_that_goes_on_is_not(
    bus: Bus, tmp_path: Path, samples: list[Sample]
) -> None:
    catalog = Catalog()
    with reaping(bus, tmp_path, samples):
        catalog.serve(view_of(bus))
        reaper = Reaper(bus, catalog, EAGER, NEVER)
        reaper.pass_once()
        assert [view.spec.run for view in catalog.served()] == [RUN]
        bus.runs.mark_done(RUN, [make_line(ordinal) for ordinal in range(TOTAL)])
        reaper.pass_once()
        assert catalog.served() == []


def test_a_run_paused_by_a_full_destination_goes_on_when_there_is_room(bus: Bus, reaper: Reaper) -> None:
    bus.runs.pause(RUN, DESTINATION_FULL)
    reaper.pass_once()
    view = view_of(bus)
    assert view.state == "active"


def test_a_run_paused_by_hand_stays_paused(bus: Bus, reaper: Reaper) -> None:
    bus.runs.pause(RUN, "by hand")
    reaper.pass_once()
    view = view_of(bus)
    assert view.state == "paused"


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ValkeyServer]:
    """A server of the test's own, which keeps what it holds over a restart."""
    with ValkeyServer(tmp_path / "redis", aof=True) as opened:
        yield opened


@pytest.fixture
def own_bus(server: ValkeyServer) -> Iterator[Bus]:
    opened = Bus.open(server.url)
    yield opened
    opened.close()


def restart_empty(server: ValkeyServer) -> None:
    server.kill()
    for path in sorted(server.folder.rglob("*appendonly*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()
    server.start()


def test_a_run_that_a_new_server_does_not_know_is_rebuilt(
    own_bus: Bus, server: ValkeyServer, tmp_path: Path, samples: list[Sample]
) -> None:
    with reaping(own_bus, tmp_path, samples) as reaper:
        reaper.pass_once()
        restart_empty(server)
        reaper.pass_once()
    view = view_of(own_bus)
    assert (view.state, view.cursor, view.open) == ("active", 0, TOTAL)


def test_a_paused_run_stays_paused_on_a_new_server_that_does_not_know_it(
    own_bus: Bus, server: ValkeyServer, tmp_path: Path, samples: list[Sample]
) -> None:
    with reaping(own_bus, tmp_path, samples, paused="by hand") as reaper:
        reaper.pass_once()
        restart_empty(server)
        reaper.pass_once()
    view = view_of(own_bus)
    assert (view.state, view.reason) == ("paused", "by hand")


def test_a_cancelled_run_stays_cancelled_when_redis_restarts(
    own_bus: Bus, server: ValkeyServer, tmp_path: Path, samples: list[Sample]
) -> None:
    with reaping(own_bus, tmp_path, samples) as reaper:
        reaper.pass_once()
        own_bus.runs.cancel(RUN)
        server.restart()
        reaper.pass_once()
    assert view_of(own_bus).state == "cancelled"


def test_no_attempt_lapses_until_everybody_could_renew_after_an_absence(
    own_bus: Bus, server: ValkeyServer, tmp_path: Path, samples: list[Sample]
) -> None:
    with reaping(own_bus, tmp_path, samples, patience=Patience(wait=3600, silence=3600)) as reaper:
        claim(own_bus, samples[0])
        claim(own_bus, samples[1])
        own_bus.requests.capture(samples[1].request(), "s1", 1000, IDENTITY)
        server.stop()
        with pytest.raises(RedisAway):
            reaper.pass_once()
        server.start()
        for key in (keys.in_flight(RUN), keys.captured("s1"), keys.storing("s1")):
            lapse(own_bus, key)
        reaper.pass_once()
    assert view_of(own_bus).reasons == {}
    assert own_bus.sites.load(SITE).requests == 1
    assert own_bus.redis.zcard(keys.captured("s1")) == 1
    records = [record for job in jobs(own_bus) if isinstance(job, RecordJob) for record in job.records]
    assert [record.ordinal for record in records] == [TOTAL - 1], "lines are written all the same"


def test_attempts_lapse_again_after_the_longest_lease(bus: Bus, tmp_path: Path, samples: list[Sample]) -> None:
    with reaping(bus, tmp_path, samples, patience=Patience(wait=0.5, silence=3600)) as reaper:
        claim(bus, samples[0])
        lapse(bus, keys.in_flight(RUN))
        reaper.pass_once()
        assert view_of(bus).reasons == {}

        def lapsed() -> bool:
            reaper.pass_once()
            return view_of(bus).reasons == {"lapsed": 1}

        wait_until(lapsed, what="the attempt to lapse")


def test_a_served_run_whose_key_is_gone_is_rebuilt_and_counts_right(
    bus: Bus, reaper: Reaper, samples: list[Sample], tmp_path: Path
) -> None:
    write_lines(tmp_path / "dataset", [0, 1])
    rebuild(bus, view_of(bus).spec)
    assert view_of(bus).stored == 2
    bus.redis.delete(keys.run(RUN))
    reaper.pass_once()
    view = view_of(bus)
    assert (view.state, view.stored, view.open, view.cursor, view.pending) == ("active", 2, TOTAL - 2, 0, 0)
    bus.redis.flushall()
    reaper.pass_once()
    assert (view_of(bus).state, view_of(bus).stored) == ("active", 2)


def test_a_run_whose_rebuilder_died_is_rebuilt_after_a_while(bus: Bus, tmp_path: Path, samples: list[Sample]) -> None:
    for rebuild_after, state in ((3600, "rebuilding"), (0, "active")):
        with reaping(bus, tmp_path, samples, rebuild_after=rebuild_after) as reaper:
            bus.runs.cancel(RUN)
            bus.runs.create(view_of(bus).spec)
            for _ in range(3):
                reaper.pass_once()
            assert view_of(bus).state == state


def test_a_rebuild_whose_manifest_cannot_be_read_waits_and_says_so(bus: Bus, reaper: Reaper, tmp_path: Path) -> None:
    (tmp_path / "dataset" / "manifest" / "a.jsonl").mkdir(parents=True)
    bus.redis.delete(keys.run(RUN))
    reaper.pass_once()
    view = view_of(bus)
    assert view.state == "rebuilding"
    assert "a.jsonl" in view.waiting_for


def test_the_gauges_of_a_run_that_ended_are_removed(bus: Bus, reaper: Reaper) -> None:
    def shown() -> tuple[float | None, float | None]:
        registry = REGISTRY
        return (
            registry.get_sample_value("headrace_queue_depth", {"queue": f"pending-{RUN}"}),
            registry.get_sample_value("headrace_run_paused", {"run": RUN}),
        )

    reaper.pass_once()
    assert shown() == (TOTAL - 1, 0)
    bus.runs.pause(RUN, "by hand")
    reaper.pass_once()
    assert shown() == (TOTAL - 1, 1)
    bus.runs.cancel(RUN)
    reaper.pass_once()
    assert shown() == (None, None)


def test_a_run_whose_samples_are_damaged_is_paused_and_says_so(bus: Bus, reaper: Reaper, tmp_path: Path) -> None:
    path = tmp_path / "dataset" / "inputs" / "samples.jsonl"
    path.write_bytes(path.read_bytes().replace(b'"rejected"', b'"rejecte\\"'))
    reaper.pass_once()
    view = view_of(bus)
    assert view.state == "paused"
    assert "inputs" in view.reason


def test_a_site_of_another_version_is_neither_evicted_nor_the_end_of_a_pass_and_is_logged_once(
    bus: Bus, tmp_path: Path, samples: list[Sample]
) -> None:
    with reaping(bus, tmp_path, samples) as reaper:
        bus.redis.hdel(keys.site(SITE.site), "fingerprint")
        with capture_logs() as logged:
            reaper.pass_once()
            reaper.pass_once()
        assert [entry["site"] for entry in logged if entry["event"] == "site left out"] == [SITE.site]
        assert bus.sites.names() == [SITE.site]
        bus.sites.register(SITE, 3600)
        with capture_logs() as logged:
            reaper.pass_once()
            bus.redis.hdel(keys.site(SITE.site), "fingerprint")
            reaper.pass_once()
        assert [entry["site"] for entry in logged if entry["event"] == "site left out"] == [SITE.site]


def test_a_run_kept_to_a_site_is_ended_for_whoever_was_killed_and_leaves_no_key_for_ever(
    bus: Bus, reaper: Reaper, samples: list[Sample]
) -> None:
    bus.runs.keep_to(RUN, "s1", 3600)
    reaper.pass_once()
    assert view_of(bus).state == "active"
    bus.runs.keep_to(RUN, "s1", -1)
    reaper.pass_once()
    assert view_of(bus).state == "cancelled"
    # A row that was on its way then is stored nevertheless.
    bus.runs.mark_done(RUN, [make_line(0)])
    reaper.pass_once()
    names = [name.decode() for name in bus.redis.keys(f"hr:run:{RUN}*")]
    assert keys.done(RUN) in names
    assert all(0 < bus.redis.pttl(name) <= 3_600_000 for name in names), names


def test_lines_of_a_run_that_is_kept_to_a_site_are_written_there_alone(bus: Bus, reaper: Reaper) -> None:
    bus.runs.keep_to(RUN, "another", 3600)
    reaper.pass_once()
    assert jobs(bus) == []
    bus.runs.keep_to(RUN, "s1", 3600)
    lapse(bus, keys.recording(RUN))
    reaper.pass_once()
    assert jobs(bus)

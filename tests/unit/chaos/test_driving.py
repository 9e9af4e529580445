"""What the chaos run says of how long it took to recover."""

from __future__ import annotations

from bench.chaos.driving import Course, Strike
from bench.chaos.report import data_of
from bench.chaos.schedule import Fault


def strike(process: str = "writer") -> Strike:
    """A process that was killed after 1 s with 10 rows and came back a second later."""
    fault = Fault(kind="kill", process=process, seconds=1.0, overlaps=False)
    return Strike(fault=fault, at=1.0, due=2.0, rows=10, back=2.0)


def test_who_is_back_has_recovered_when_it_was_ready_and_a_row_was_stored_after_that() -> None:
    seen = strike()
    seen.see(3.0, ready=False, stored=15)
    seen.see(4.0, ready=True, stored=20)
    seen.see(5.0, ready=True, stored=20)
    assert seen.to_recover is None
    seen.see(6.0, ready=True, stored=21)
    assert seen.to_recover == 4.0


def test_strikes_that_were_not_seen_to_recover_are_counted_beside_those_that_were() -> None:
    seen, unseen = strike(), strike("writer-2")
    seen.see(3.0, ready=True, stored=20)
    seen.see(4.0, ready=True, stored=21)
    data = data_of(1, 300, Course(strikes=[seen, unseen]), {}, [])
    (entry,) = data["faults_by_kind"]
    assert (entry["process"], entry["times"], entry["not_seen"]) == ("writer", 2, 1)
    assert (entry["median"], entry["max"]) == (2.0, 2.0)


def test_jobs_that_strikes_may_have_broken_off_are_those_of_both_writers_where_redis_was_struck() -> None:
    processes = ("writer", "writer-2", "redis", "watcher", "dispatcher-2", "engine")
    assert Course(strikes=[strike(process) for process in processes]).broken_off == 4

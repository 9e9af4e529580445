from __future__ import annotations

from dataclasses import replace
from fnmatch import fnmatch

import pytest

from headrace.bus import Bus, keys
from headrace.manifest import Line
from headrace.runs import Identity
from tests.support.bus_values import (
    IDENTITY,
    RUN,
    SITE,
    capture,
    claim,
    make_attempt,
    make_line,
    make_spec,
    start_run,
)
from tests.support.waiting import wait_until

pytestmark = pytest.mark.redis


def state(bus: Bus) -> str:
    view = bus.runs.get(RUN)
    assert view is not None
    return view.state


def test_a_run_is_created_once_and_another_of_its_name_is_told(bus: Bus) -> None:
    spec = make_spec()
    assert bus.runs.get(RUN) is None
    assert bus.runs.spec(RUN) is None
    assert bus.runs.create(spec) == "created"
    assert bus.runs.create(replace(spec, output="/elsewhere", max_attempts=9)) == "same"
    assert bus.runs.create(replace(spec, dataset="e" * 16)) == "other"
    assert bus.runs.spec(RUN) == replace(spec, output="/elsewhere", max_attempts=9)
    assert state(bus) == "rebuilding"
    assert bus.runs.names() == [RUN]


def test_states_change_only_as_they_may_and_say_what_holds(bus: Bus) -> None:
    assert bus.runs.pause(RUN, "x") is None
    bus.runs.create(make_spec())
    assert bus.runs.pause(RUN, "x") == "rebuilding"
    assert bus.runs.activate(RUN) == "active"
    assert bus.runs.activate(RUN) == "active"
    assert bus.runs.pause(RUN, "disk") == "paused"
    view = bus.runs.get(RUN)
    assert view is not None
    assert (view.state, view.reason) == ("paused", "disk")
    assert bus.runs.pause(RUN, "other") == "paused"
    assert bus.runs.cancel(RUN) == "cancelled"
    assert bus.runs.activate(RUN) == "cancelled"
    assert bus.runs.pause(RUN, "x") == "cancelled"


def test_what_a_run_waits_for_is_forgotten_when_it_is_paused_and_when_it_ends(bus: Bus) -> None:
    start_run(bus)
    view = bus.runs.get(RUN)
    assert view is not None
    for end in (
        lambda: bus.runs.pause(RUN, "by hand"),
        lambda: bus.runs.activate(RUN),
        lambda: bus.runs.pause_for(RUN, "mismatches", view.window),
        lambda: bus.runs.mark_done(RUN, [make_line(ordinal) for ordinal in range(5)]),
    ):
        bus.runs.say_waiting(RUN, "an engine")
        assert end()
        now = bus.runs.get(RUN)
        assert now is not None
        assert now.waiting_for == "", now.state
    assert state(bus) == "finished"


def test_an_output_moves_only_when_no_row_is_on_its_way_to_the_one_before(bus: Bus) -> None:
    spec = start_run(bus)
    elsewhere = replace(spec, output="/elsewhere")
    assert bus.runs.create(elsewhere) == "moved"
    claim(bus, make_attempt(0))
    bus.runs.cancel(spec.run)
    assert bus.runs.create(elsewhere) == "same"
    known = bus.runs.spec(spec.run)
    assert known is not None
    assert known.output == "/elsewhere"


def test_a_cancelled_run_that_is_submitted_again_is_rebuilt_first(bus: Bus) -> None:
    """It may have been cancelled before what the manifest holds was marked."""
    bus.runs.create(make_spec())
    bus.runs.cancel(RUN)
    assert bus.runs.feed(RUN, 0, ["", ""]) is None
    assert bus.runs.create(make_spec()) == "same"
    assert state(bus) == "rebuilding"
    assert bus.runs.feed(RUN, 0, ["", ""]) is None
    assert bus.runs.activate(RUN) == "active"
    assert bus.runs.feed(RUN, 0, ["", ""]) == 2


def test_samples_are_fed_once_in_order_and_never_beyond_the_run(bus: Bus) -> None:
    start_run(bus, fed=0)
    assert bus.runs.feed(RUN, 0, ["", "too_long"]) == 2
    assert bus.runs.feed(RUN, 0, ["", ""]) is None, "another dispatcher was first"
    assert bus.runs.feed(RUN, 2, [""] * 9) == 5
    assert bus.runs.feed(RUN, 5, [""] * 9) == 5
    assert bus.runs.pending(RUN, 100) == [0, 2, 3, 4]
    assert bus.runs.pending(RUN, 2, skip=1) == [2, 3]
    assert bus.runs.pending(RUN, 0) == []
    view = bus.runs.get(RUN)
    assert view is not None
    assert (view.cursor, view.fed, view.pending, view.open) == (5, 5, 4, 5)


def test_what_the_manifest_holds_is_not_fed(bus: Bus) -> None:
    bus.runs.create(make_spec())
    lines = [make_line(0), make_line(3, "failed", "timeout"), make_line(4, "rejected", "too_long")]
    assert bus.runs.mark_done(RUN, lines) == 3
    assert bus.runs.mark_done(RUN, lines) == 0
    bus.runs.activate(RUN)
    assert bus.runs.feed(RUN, 0, [""] * 5) == 5
    assert bus.runs.pending(RUN, 9) == [1, 2]
    view = bus.runs.get(RUN)
    assert view is not None
    assert (view.stored, view.failed, view.rejected, view.open) == (1, 1, 1, 2)
    assert (view.failed_by, view.rejected_by) == ({"timeout": 1}, {"too_long": 1})


def test_the_cursor_passes_over_what_is_done(bus: Bus) -> None:
    start_run(bus, fed=0, total=12)
    bus.runs.mark_done(RUN, [make_line(ordinal) for ordinal in (3, 5, 6, 7, 8, 9)])
    assert bus.runs.feed(RUN, 0, ["", ""]) == 2
    assert bus.runs.feed(RUN, 2, [""]) == 4
    assert bus.runs.feed(RUN, 4, [""]) == 10
    bus.runs.mark_done(RUN, [make_line(11)])
    assert bus.runs.feed(RUN, 10, [""]) == 12
    assert bus.runs.pending(RUN, 9) == [0, 1, 2, 4, 10]


def test_many_lines_are_marked_in_batches(bus: Bus) -> None:
    start_run(bus, total=1300, fed=0)
    lines: list[Line] = [make_line(ordinal) for ordinal in range(1300)]
    assert bus.runs.mark_done(RUN, iter(lines)) == 1300
    assert bus.runs.mark_done(RUN, []) == 0
    assert state(bus) == "finished"


def test_a_run_whose_samples_are_all_done_is_finished_and_expires(bus: Bus) -> None:
    start_run(bus, total=2, fed=2)
    bus.runs.mark_done(RUN, [make_line(0)])
    assert state(bus) == "active"
    bus.runs.pause(RUN, "why")
    bus.runs.mark_done(RUN, [make_line(1)])
    assert state(bus) == "finished"
    assert bus.runs.cancel(RUN) == "finished"
    assert bus.runs.create(make_spec(total=2)) == "same"
    assert state(bus) == "finished"
    for key in (keys.run(RUN), keys.done(RUN)):
        assert 29 * 86400 < bus.redis.ttl(key) <= 30 * 86400


def test_a_run_of_nothing_is_finished_when_it_is_activated(bus: Bus) -> None:
    bus.runs.create(make_spec(total=0))
    assert bus.runs.activate(RUN) == "finished"


def test_a_cancelled_run_keeps_what_comes_and_does_not_finish(bus: Bus) -> None:
    start_run(bus, total=1, fed=1)
    (request,) = claim(bus, make_attempt(0))
    bus.runs.cancel(RUN)
    assert bus.requests.capture(request, "sitea", 300, IDENTITY).outcome == "captured"
    assert bus.requests.stored(request, "sitea", 7) == "stored"
    assert state(bus) == "cancelled"
    bus.runs.create(make_spec(total=1))
    assert bus.runs.activate(RUN) == "finished"


def test_names_of_expired_runs_are_dropped(bus: Bus) -> None:
    start_run(bus)
    bus.runs.create(make_spec(run="other"))
    assert bus.runs.names() == ["other", RUN]
    bus.redis.delete(keys.run("other"))
    assert bus.runs.names() == [RUN]
    assert bus.redis.smembers(keys.RUNS) == {RUN.encode()}


def test_the_identity_is_set_once(bus: Bus) -> None:
    bus.runs.create(make_spec())
    assert bus.runs.identity(RUN) is None
    bus.runs.set_identity(RUN, IDENTITY)
    bus.runs.set_identity(RUN, Identity(engine="other", weight_version="other"))
    assert bus.runs.identity(RUN) == IDENTITY


def test_what_a_run_waits_for_is_said_only_of_a_run(bus: Bus) -> None:
    bus.runs.say_waiting(RUN, "an engine")
    assert bus.redis.keys() == []
    start_run(bus)
    bus.runs.say_waiting(RUN, "an engine")
    view = bus.runs.get(RUN)
    assert view is not None
    assert view.waiting_for == "an engine"


def test_half_a_run_is_no_run(bus: Bus) -> None:
    """Redis was emptied while the run was rebuilt."""
    bus.runs.set_identity(RUN, IDENTITY)
    assert bus.runs.get(RUN) is None
    assert bus.runs.create(make_spec()) == "created"


def test_odd_names_and_reasons_come_back_as_they_went(bus: Bus) -> None:
    start_run(bus, fed=0)
    reason = "a|b\nü:{x}"
    assert bus.runs.feed(RUN, 0, [reason]) == 1
    _, records = bus.requests.reap_run(RUN)
    assert records[0].reason == reason


def test_every_key_has_a_ttl_or_a_reason(bus: Bus) -> None:
    start_run(bus, fed=4)
    bus.runs.feed(RUN, 4, ["too_long"])
    one, two, _ = claim(bus, *(make_attempt(ordinal) for ordinal in range(3)))
    bus.requests.capture(one, "sitea", 300, IDENTITY)
    bus.requests.end(two, burn=True, kind="mismatch", reason="shape")
    bus.runs.mark_done(RUN, [make_line(3)])
    found = {key.decode(): bus.redis.ttl(key) for key in bus.redis.scan_iter()}
    assert {name.split(":")[-1] for name in found} >= {"pending", "open", "inflight", "credits", "captured", "storing"}
    for name, ttl in found.items():
        assert ttl > 0 or any(fnmatch(name, pattern) for pattern in keys.WITHOUT_TTL), name


def test_a_run_may_be_kept_to_one_site_and_is_any_ones_otherwise(bus: Bus) -> None:
    bus.runs.create(make_spec())
    view = bus.runs.get(RUN)
    assert view is not None
    assert view.only_site == ""
    bus.runs.keep_to(RUN, SITE, 60)
    view = bus.runs.get(RUN)
    assert view is not None
    assert view.only_site == SITE


def test_open_samples_are_counted_by_state(bus: Bus) -> None:
    assert bus.runs.states(RUN) == {}
    start_run(bus)
    first, _ = claim(bus, make_attempt(0), make_attempt(1))
    capture(bus, first)
    assert bus.runs.states(RUN) == {"captured": 1, "in_flight": 1, "pending": 3}


def test_a_run_that_ended_can_be_forgotten_with_all_its_keys(bus: Bus) -> None:
    start_run(bus)
    first, _ = claim(bus, make_attempt(0), make_attempt(1))
    bus.requests.end(first, burn=True, kind="error", reason="x")
    bus.runs.cancel(RUN)
    assert bus.redis.keys(f"hr:run:{RUN}:*")
    bus.runs.expire(RUN, 0.05)
    wait_until(lambda: bus.runs.names() == [], 5, "the run to be forgotten")
    assert bus.redis.keys(f"hr:run:{RUN}*") == []

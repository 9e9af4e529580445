"""What a proven dump does to its sample, from whatever state, and what Redis does not know."""

from __future__ import annotations

import pytest

from headrace.bus import Bus, keys
from headrace.ids import RequestId
from headrace.runs import Identity
from tests.support.bus_values import (
    IDENTITY,
    LONG,
    RUN,
    SITE,
    capture,
    claim,
    lapse,
    make_attempt,
    make_line,
    make_site,
    start_run,
    state_of,
)

pytestmark = pytest.mark.redis


@pytest.fixture
def bus(bus: Bus) -> Bus:
    """The bus with leases that lapse only when a test says so."""
    return Bus(bus.redis, leases=LONG)


def test_a_late_dump_of_an_earlier_attempt_wins_over_the_live_one(bus: Bus) -> None:
    start_run(bus)
    (early,) = claim(bus, make_attempt(0, "aaaaaaaa"))
    bus.requests.end(early, burn=True, kind="error", reason="lapsed")
    (live,) = claim(bus, make_attempt(0, "bbbbbbbb"))
    capture(bus, early)
    assert bus.sites.load(make_site()).requests == 1, "the engine still works on the live one"
    for _ in range(2):
        assert bus.requests.capture(live, SITE, 300, IDENTITY).outcome == "duplicate"
    assert bus.sites.load(make_site()).requests == 0
    assert bus.requests.end(live, burn=True, kind="error", reason="timeout") == "stale"
    assert state_of(bus, 0)[:2] == ["captured", "2"]
    view = bus.runs.get(RUN)
    assert view is not None
    assert (view.reasons, view.verdicts) == ({"duplicate": 1, "lapsed": 1}, 1)


def test_a_bad_answer_about_a_captured_request_takes_nothing_from_the_writer(bus: Bus) -> None:
    start_run(bus)
    (request,) = claim(bus, make_attempt(0))
    job = capture(bus, request)
    for kind, burn, reason in (("error", False, "connection"), ("error", True, "timeout"), ("loss", True, "aborted")):
        answer = bus.requests.end(request, burn=burn, kind=kind, reason=reason, unless_captured=True)  # type: ignore[arg-type]
        assert answer == "captured"
    assert bus.requests.begin_store(request, job, SITE) == "go"
    view = bus.runs.get(RUN)
    assert view is not None
    assert (view.reasons, bus.runs.dead(RUN)) == ({}, [])


def test_a_late_dump_wins_from_pending_and_takes_the_sample_off_the_list(bus: Bus) -> None:
    start_run(bus)
    (early,) = claim(bus, make_attempt(0))
    bus.requests.end(early, burn=True, kind="error", reason="lapsed")
    capture(bus, early)
    assert 0 not in bus.runs.pending(RUN, 10)


def test_the_dump_of_a_failed_sample_is_closed_and_holds_no_credit(bus: Bus) -> None:
    start_run(bus, max_attempts=2)
    (one,) = claim(bus, make_attempt(0, "aaaaaaaa"))
    bus.requests.end(one, burn=True, kind="error", reason="lapsed")
    (two,) = claim(bus, make_attempt(0, "bbbbbbbb"))
    capture(bus, one)
    lapse(bus, keys.captured(SITE), str(one))
    assert bus.requests.reap_site(SITE)[0] == [str(one)]
    assert state_of(bus, 0)[0] == "failed"
    assert bus.requests.capture(two, SITE, 300, IDENTITY).outcome == "closed"
    assert bus.sites.load(make_site()).requests == 0


def test_a_captured_dump_that_is_gone_burns_whatever_is_said(bus: Bus) -> None:
    start_run(bus)
    (request,) = claim(bus, make_attempt(0))
    capture(bus, request)
    assert bus.requests.end(request, burn=False, kind="error", reason="odd") == "pending"
    assert state_of(bus, 0)[1] == "1"


def test_k_never_comes_back_for_a_request(bus: Bus) -> None:
    """RQ may still know an earlier job by its id, and would not queue it again."""
    start_run(bus)
    (request,) = claim(bus, make_attempt(0))
    assert capture(bus, request) == 1
    lapse(bus, keys.storing(SITE), str(request))
    _, jobs = bus.requests.reap_site(SITE)
    assert [(job.request, job.job, job.mask, job.sample) for job in jobs] == [(str(request), 2, (1, 2), "s0")]
    assert bus.requests.begin_store(request, 1, SITE) == "stale"
    assert bus.requests.begin_store(request, 2, SITE) == "go"
    lapse(bus, keys.captured(SITE), str(request))
    bus.requests.reap_site(SITE)
    assert bus.requests.begin_store(request, 2, SITE) == "stale"
    assert capture(bus, request) == 3
    assert capture(bus, request) == 3


def test_a_lapsed_captured_lease_wins_over_a_lapsed_storing_lease(bus: Bus) -> None:
    start_run(bus)
    (request,) = claim(bus, make_attempt(0))
    capture(bus, request)
    lapse(bus, keys.captured(SITE), str(request))
    lapse(bus, keys.storing(SITE), str(request))
    assert bus.requests.reap_site(SITE) == ([str(request)], [])
    assert bus.requests.hold(SITE, [str(request)], []) == [str(request)]


def test_the_first_row_sets_the_identity_and_another_is_told(bus: Bus) -> None:
    start_run(bus)
    one, two = claim(bus, make_attempt(0), make_attempt(1))
    capture(bus, one)
    other = Identity(engine="engine 2", weight_version="w1")
    assert bus.requests.capture(two, SITE, 300, other).outcome == "identity"
    assert bus.requests.end(two, burn=True, kind="mismatch", reason="engine_changed") == "pending"
    assert bus.runs.identity(RUN) == IDENTITY


def test_verdicts_count_each_dump_once(bus: Bus) -> None:
    start_run(bus)
    good, bad, late = claim(bus, *(make_attempt(ordinal) for ordinal in range(3)))
    for _ in range(2):
        capture(bus, good)
        assert bus.requests.end(bad, burn=True, kind="mismatch", reason="token_content") == "pending"
    # An attempt that had ended when its wrong dump came.
    assert bus.requests.end(late, burn=True, kind="error", reason="lapsed") == "pending"
    for _ in range(2):
        assert bus.requests.end(late, burn=True, kind="mismatch", reason="shape") == "pending"
    view = bus.runs.get(RUN)
    assert view is not None
    assert (view.verdicts, view.mismatches) == (3, 2)
    assert view.reasons == {"lapsed": 1, "shape": 1, "token_content": 1}
    # The writer found by checksum what the watcher could not see.
    assert bus.requests.end(good, burn=True, kind="mismatch", reason="corrupt") == "pending"
    view = bus.runs.get(RUN)
    assert view is not None
    assert (view.verdicts, view.mismatches, view.reasons["corrupt"]) == (3, 3, 1)


def test_what_redis_does_not_know_is_unknown_and_leaves_no_key(bus: Bus) -> None:
    request = RequestId.parse(make_attempt(0).request)
    assert bus.requests.capture(request, SITE, 300, IDENTITY).outcome == "unknown_run"
    assert bus.requests.stored(request, SITE, 7) == "unknown_run"
    assert bus.requests.end(request, burn=True, kind="mismatch", reason="shape") == "unknown"
    assert bus.requests.begin_store(request, 1, SITE) == "stale"
    assert bus.requests.reap_run(RUN) == ([], [])
    assert bus.requests.reap_site(SITE) == ([], [])
    assert bus.runs.mark_done(RUN, [make_line(0)]) == 0
    assert not bus.requests.reject(RUN, 0, "r")
    assert bus.redis.keys() == []
    start_run(bus)
    assert bus.requests.capture(request, SITE, 300, IDENTITY).outcome == "unknown_request"
    assert bus.requests.end(request, burn=True, kind="mismatch", reason="shape") == "unknown"
    assert bus.redis.keys("hr:req:*") == []


@pytest.mark.parametrize("ordinal", [5, 4_000_000_000, 999_999_999_999])
def test_an_ordinal_outside_the_run_is_unknown_and_grows_nothing(bus: Bus, ordinal: int) -> None:
    start_run(bus)
    request = RequestId.parse(make_attempt(ordinal).request)
    assert bus.requests.capture(request, SITE, 300, IDENTITY).outcome == "unknown_request"
    assert bus.requests.stored(request, SITE, 7) == "again"
    assert bus.requests.begin_store(request, 1, SITE) == "stale"
    assert bus.runs.mark_done(RUN, [make_line(ordinal), make_line(-1)]) == 0
    assert bus.redis.strlen(keys.done(RUN)) == 0


def test_a_row_of_a_sample_in_any_state_is_accepted_once(bus: Bus) -> None:
    start_run(bus)
    (live,) = claim(bus, make_attempt(0))
    assert bus.requests.stored(live, SITE, 7) == "stored"
    assert bus.requests.stored(live, SITE, 7) == "again"
    assert bus.requests.capture(live, SITE, 300, IDENTITY).outcome == "done"
    assert bus.requests.begin_store(live, 1, SITE) == "done"
    assert bus.sites.load(make_site()).requests == 0
    assert bus.requests.stored(RequestId.parse(make_attempt(1).request), SITE, 7) == "stored"
    assert bus.runs.pending(RUN, 9) == [2, 3, 4]


def test_a_line_for_a_captured_sample_takes_its_leases_along(bus: Bus) -> None:
    """Else the watcher would hold a request that nothing ever ends."""
    start_run(bus)
    (request,) = claim(bus, make_attempt(0))
    capture(bus, request)
    assert bus.runs.mark_done(RUN, [make_line(0)]) == 1
    assert bus.requests.hold(SITE, [str(request)], [str(request)]) == [str(request)]
    assert bus.redis.exists(keys.captured(SITE), keys.storing(SITE), keys.request(str(request))) == 0


def test_rejections_last_and_are_recorded(bus: Bus) -> None:
    start_run(bus)
    assert bus.requests.reject(RUN, 1, "exceeds_engine")
    assert bus.requests.reject(RUN, 1, "exceeds_engine")
    (request,) = claim(bus, make_attempt(0))
    assert not bus.requests.reject(RUN, 0, "exceeds_engine")
    _, records = bus.requests.reap_run(RUN)
    assert [(r.ordinal, r.status, r.reason, r.request) for r in records] == [(1, "rejected", "exceeds_engine", "")]
    capture(bus, request)


def test_the_measured_bytes_of_a_site_grow_with_a_capture_until_the_next_heartbeat(bus: Bus) -> None:
    start_run(bus)
    (request,) = claim(bus, make_attempt(0))
    capture(bus, request)
    site = bus.sites.get(SITE)
    assert site is not None
    assert site.dump_bytes == 300
    assert bus.sites.load(site).promised_bytes == 0

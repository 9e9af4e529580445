"""A run whose latest verdicts are mismatches too often is paused by the reaper, and goes on when somebody says so."""

from __future__ import annotations

import pytest

from headrace.bus import Bus
from headrace.bus.values import DESTINATION_FULL, AttemptKind, RunView
from headrace.ids import RequestId
from headrace_dispatcher.catalog import Catalog
from headrace_dispatcher.mismatches import MismatchLimit
from headrace_dispatcher.patience import Patience
from headrace_dispatcher.reaper import Reaper
from tests.support.bus_values import IDENTITY, RUN, SITE, claim, make_attempt, make_line, make_site, start_run
from tests.support.dispatching import view_of

pytestmark = pytest.mark.redis

LEAST = 10
LIMIT = MismatchLimit(share=0.2, least=LEAST)  # the third mismatch of ten verdicts is one too many


class Course:
    """A run whose verdicts a test decides, with a reaper that looks at it."""

    def __init__(self, bus: Bus, limit: MismatchLimit = LIMIT, *, total: int = 500) -> None:
        self.bus = bus
        self.claimed = 0
        site = make_site(max_requests=1000, max_tokens=10**6, dump_cap_bytes=10**9)
        start_run(bus, fed=total, total=total, sites=[site])
        self.reaper = Reaper(bus, Catalog(), Patience(wait=3600, silence=3600), limit)

    def claim(self, count: int) -> list[RequestId]:
        """The next samples' requests."""
        start, self.claimed = self.claimed, self.claimed + count
        return claim(self.bus, *(make_attempt(ordinal) for ordinal in range(start, self.claimed)))

    def again(self, ordinal: int, attempt: int) -> RequestId:
        """A further request of a sample."""
        return claim(self.bus, make_attempt(ordinal, f"{attempt:08d}"))[0]

    def match(self, count: int) -> list[RequestId]:
        requests = self.claim(count)
        for request in requests:
            assert self.bus.requests.capture(request, SITE, 300, IDENTITY).outcome == "captured"
        return requests

    def refuse(self, count: int, reason: str = "token_content", kind: AttemptKind = "mismatch") -> None:
        for request in self.claim(count):
            self.end(request, reason, kind)

    def end(self, request: RequestId, reason: str = "token_content", kind: AttemptKind = "mismatch") -> str:
        return self.bus.requests.end(request, burn=kind == "mismatch", kind=kind, reason=reason)

    def look(self) -> RunView:
        """The run after a pass of the reaper."""
        self.reaper.pass_once()
        return view_of(self.bus, RUN)


@pytest.fixture
def course(bus: Bus) -> Course:
    return Course(bus)


def test_a_run_is_paused_as_soon_as_the_limit_is_certainly_passed_and_says_why(course: Course) -> None:
    course.refuse(2)
    assert course.look().state == "active"
    course.match(1)
    course.refuse(1, "not_finite")
    view = course.look()
    assert view.state == "paused"
    assert view.reason == (
        "mismatch rate 75.0 % of the last 4 samples' first attempts (token_content 2, not_finite 1), "
        "limit 20 % of at least 10"
    )


def test_what_is_in_flight_still_ends_and_the_pause_stays(course: Course) -> None:
    flying = course.claim(4)
    course.refuse(3)
    before = course.look()
    for request in flying[:2]:
        assert course.bus.requests.capture(request, SITE, 300, IDENTITY).outcome == "captured"
        assert course.bus.requests.stored(request, SITE, 11) == "stored"
    for request in flying[2:]:
        course.end(request, "shape")
    view = course.look()
    assert (view.state, view.reason) == ("paused", before.reason)
    assert (view.stored, view.in_flight) == (2, 0)


def test_losses_errors_and_duplicates_count_as_neither(course: Course) -> None:
    course.refuse(20, "no_room", "loss")
    course.refuse(20, "timeout", "error")
    course.match(1)
    view = course.look()
    assert (view.state, view.window.verdicts, view.window.mismatches) == ("active", 1, 0)


def test_a_long_clean_run_does_not_hide_a_new_fault(course: Course) -> None:
    for _ in range(20):
        course.match(LEAST)
        assert course.look().window.verdicts <= 2 * LEAST
    course.refuse(2)
    assert course.look().state == "active"
    course.refuse(3)
    assert course.look().state == "paused"


def test_few_mismatches_over_a_long_run_never_pause_it(course: Course) -> None:
    for _ in range(30):
        course.match(9)
        course.refuse(1)
        assert course.look().state == "active"


def test_a_run_that_is_resumed_begins_a_new_window(course: Course) -> None:
    course.refuse(5)
    assert course.look().state == "paused"
    assert course.bus.runs.activate(RUN) == "active"
    view = course.look()
    assert (view.state, view.reason, view.window.verdicts) == ("active", "", 0)
    course.refuse(2)
    assert course.look().state == "active"
    course.refuse(1)
    assert course.look().state == "paused"


def test_a_dispatcher_that_looked_before_a_resume_does_not_pause_the_run_again(course: Course) -> None:
    course.refuse(5)
    window = view_of(course.bus, RUN).window
    assert course.bus.runs.pause_for(RUN, "too many", window)
    assert not course.bus.runs.pause_for(RUN, "too many", window), "it is paused already"
    course.bus.runs.activate(RUN)
    assert not course.bus.runs.pause_for(RUN, "too many", window)
    assert view_of(course.bus, RUN).state == "active"


@pytest.mark.parametrize("reason", ["by hand", DESTINATION_FULL])
def test_another_pause_is_not_overwritten_and_its_end_by_itself_begins_no_new_window(
    course: Course, reason: str
) -> None:
    course.refuse(5)
    course.bus.runs.pause(RUN, reason, by_hand=True)
    assert course.look().reason == reason
    course.bus.runs.activate(RUN, paused_for=reason)
    assert course.look().reason.startswith("mismatch rate 100.0 % of the last 5 samples' first attempts")


def test_a_run_paused_for_mismatches_is_not_resumed_by_room_at_the_destination(course: Course) -> None:
    course.refuse(5)
    reason = course.look().reason
    assert course.bus.runs.pause(RUN, DESTINATION_FULL) == "paused"
    assert course.bus.runs.activate(RUN, paused_for=DESTINATION_FULL) == "paused"
    assert course.look().reason == reason


@pytest.mark.parametrize(("share", "state"), [(0.2, "paused"), (1, "active")])
def test_dumps_that_a_writer_refuses_after_a_resume_are_the_rate_of_the_new_window(
    bus: Bus, share: float, state: str
) -> None:
    course = Course(bus, MismatchLimit(share=share, least=LEAST))
    proven = course.match(5)
    bus.runs.pause(RUN, "by hand", by_hand=True)
    bus.runs.activate(RUN)
    for request in proven[:3]:
        course.end(request, "corrupt")
    view = course.look()
    assert (view.window.verdicts, view.window.mismatches, view.state) == (0, 3, state)
    said = "mismatch rate 100.0 % of the last 3 samples' first attempts (corrupt 3), limit 20 % of at least 10"
    assert view.reason == (said if state == "paused" else "")


def test_a_sample_that_never_matches_is_one_mismatch_however_often_it_is_tried(course: Course) -> None:
    course.refuse(2)
    for ordinal in (0, 1):
        assert [course.end(course.again(ordinal, attempt)) for attempt in (2, 3)] == ["pending", "failed"]
    view = course.look()
    assert (view.state, view.verdicts, view.mismatches) == ("active", 6, 6)
    assert (view.window.verdicts, view.window.mismatches, view.window.reasons) == (2, 2, {"token_content": 2})


def test_the_attempt_after_one_that_was_released_is_a_first_one_again(course: Course) -> None:
    first = course.claim(1)[0]
    assert course.end(first, "connection", "error") == "pending"
    course.end(course.again(0, 2))
    course.end(first)
    window = course.look().window
    assert (window.verdicts, window.mismatches) == (2, 2), "a request counts once, whatever became of its attempt"
    course.end(first)
    course.bus.requests.capture(first, SITE, 300, IDENTITY)
    assert course.look().window == window


def test_samples_that_were_reopened_count_no_more(course: Course) -> None:
    failed = [make_line(ordinal, "failed", "shape") for ordinal in range(20)]
    assert course.bus.runs.mark_done(RUN, failed) == 20
    assert list(course.bus.runs.reopen(RUN, range(20))) == list(range(20))
    assert course.bus.runs.feed(RUN, 0, [""] * 20) is not None
    for ordinal in range(10):
        course.end(course.again(ordinal, 1))
        assert course.bus.requests.capture(course.again(10 + ordinal, 1), SITE, 300, IDENTITY).outcome == "captured"
    view = course.look()
    assert (view.state, view.mismatches, view.window.verdicts, view.window.mismatches) == ("active", 10, 0, 0)


def test_a_run_that_was_over_the_limit_at_its_end_is_not_paused_when_it_is_reopened(bus: Bus) -> None:
    course = Course(bus, total=5)
    course.refuse(5)
    failed = [make_line(ordinal, "failed", "shape") for ordinal in range(5)]
    bus.runs.mark_done(RUN, failed)
    assert view_of(bus, RUN).state == "finished"
    assert list(bus.runs.reopen(RUN, range(5))) == list(range(5))
    assert course.look().state == "active"


def test_a_run_with_nothing_left_to_give_out_is_not_paused_for_it_ends_by_itself(bus: Bus) -> None:
    course = Course(bus, total=5)
    flying = course.claim(5)
    for ordinal in range(4):
        course.end(flying[ordinal])
        for attempt in (2, 3):
            course.end(course.again(ordinal, attempt))
    bus.runs.mark_done(RUN, [make_line(0, "failed", "shape", str(flying[0]))])
    assert len(bus.requests.reap_run(RUN)[1]) == 3, "the reaper has no lines to see to, only verdicts"
    view = course.look()
    assert (view.state, view.pending, view.window.mismatches) == ("active", 0, 4)
    course.end(flying[4])
    assert course.look().state == "paused", "a sample waits for another attempt"


def test_a_run_of_which_samples_were_not_fed_yet_is_paused(bus: Bus) -> None:
    start_run(bus, fed=3, total=5)
    reaper = Reaper(bus, Catalog(), Patience(wait=3600, silence=3600), LIMIT)
    for request in claim(bus, *(make_attempt(ordinal, tokens=2) for ordinal in range(3))):
        assert bus.requests.end(request, burn=True, kind="mismatch", reason="shape") == "pending"
    later = claim(bus, *(make_attempt(ordinal, "bbbbbbbb", tokens=2) for ordinal in range(3)))
    assert (view_of(bus, RUN).pending, len(later)) == (0, 3)
    reaper.pass_once()
    assert view_of(bus, RUN).state == "paused"


def test_a_limit_of_one_never_pauses(bus: Bus) -> None:
    course = Course(bus, MismatchLimit(share=1, least=1))
    course.refuse(100)
    assert course.look().state == "active"


def test_a_run_that_redis_does_not_know_is_not_made_up(bus: Bus) -> None:
    bus.runs.mark_verdicts(RUN, 1)
    assert bus.redis.dbsize() == 0

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
from tests.support.bus_values import IDENTITY, RUN, SITE, claim, make_attempt, make_site, start_run
from tests.support.dispatching import view_of

pytestmark = pytest.mark.redis

LEAST = 10
LIMIT = MismatchLimit(share=0.2, least=LEAST)  # the third mismatch of ten verdicts is one too many


class Course:
    """A run whose verdicts a test decides, with a reaper that looks at it."""

    def __init__(self, bus: Bus, limit: MismatchLimit = LIMIT) -> None:
        self.bus = bus
        self.claimed = 0
        site = make_site(max_requests=1000, max_tokens=10**6, dump_cap_bytes=10**9)
        start_run(bus, fed=500, total=500, sites=[site])
        self.reaper = Reaper(bus, Catalog(), Patience(wait=3600, silence=3600), limit)

    def claim(self, count: int) -> list[RequestId]:
        """The next samples' requests."""
        start, self.claimed = self.claimed, self.claimed + count
        return claim(self.bus, *(make_attempt(ordinal) for ordinal in range(start, self.claimed)))

    def match(self, count: int) -> None:
        for request in self.claim(count):
            assert self.bus.requests.capture(request, SITE, 300, IDENTITY).outcome == "captured"

    def refuse(self, count: int, reason: str = "token_content", kind: AttemptKind = "mismatch") -> None:
        for request in self.claim(count):
            self.bus.requests.end(request, burn=True, kind=kind, reason=reason)

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
        "mismatch rate 75.0 % of the last 4 verdicts (token_content 2, not_finite 1), limit 20 % of 10 verdicts"
    )


def test_what_is_in_flight_still_ends_and_the_pause_stays(course: Course) -> None:
    flying = course.claim(4)
    course.refuse(3)
    before = course.look()
    for request in flying[:2]:
        assert course.bus.requests.capture(request, SITE, 300, IDENTITY).outcome == "captured"
        assert course.bus.requests.stored(request, SITE, 11) == "stored"
    for request in flying[2:]:
        course.bus.requests.end(request, burn=True, kind="mismatch", reason="shape")
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
    assert course.look().reason.startswith("mismatch rate 100.0 % of the last 5 verdicts")


def test_a_run_paused_for_mismatches_is_not_resumed_by_room_at_the_destination(course: Course) -> None:
    course.refuse(5)
    reason = course.look().reason
    assert course.bus.runs.pause(RUN, DESTINATION_FULL) == "paused"
    assert course.bus.runs.activate(RUN, paused_for=DESTINATION_FULL) == "paused"
    assert course.look().reason == reason


def test_a_limit_of_one_never_pauses(bus: Bus) -> None:
    course = Course(bus, MismatchLimit(share=1, least=1))
    course.refuse(100)
    assert course.look().state == "active"


def test_a_run_that_redis_does_not_know_is_not_made_up(bus: Bus) -> None:
    bus.runs.mark_verdicts(RUN, 1)
    assert bus.redis.dbsize() == 0

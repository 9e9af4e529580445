"""When an engine that fails gets requests again."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.errors import IllegalTransition
from headrace_dispatcher.breaker import (
    ANSWER_SECONDS,
    FAILURES,
    FIRST_WAIT,
    LONGEST_TRIED_WAIT,
    LONGEST_WAIT,
    TRANSITIONS,
    Breaker,
    Event,
    State,
)

NOW = 1000.0


def failing(times: int, breaker: Breaker | None = None, *, at_once: bool = False) -> Breaker:
    """A breaker after so many requests, sent together, that failed."""
    breaker = breaker or Breaker()
    epoch = breaker.epoch
    for _ in range(times):
        breaker = breaker.failed(epoch, NOW, "http_503", at_once=at_once)
    return breaker


def half_open() -> Breaker:
    opened = failing(FAILURES).probing()
    return opened.probed(opened.epoch, NOW, "")


def test_every_state_has_a_row_and_only_an_open_breaker_can_pass_a_probe() -> None:
    assert set(TRANSITIONS) == set(State)
    assert [state for state in State if Event.PASS in TRANSITIONS[state]] == [State.OPEN]
    for breaker in (Breaker(), half_open(), Breaker.tried()):
        with pytest.raises(IllegalTransition, match=f"{breaker.state} cannot pass"):
            breaker.probed(breaker.epoch, NOW, "")


def test_only_failures_in_a_row_open_it() -> None:
    breaker = failing(FAILURES - 1)
    assert (breaker.state, breaker.admits) == (State.CLOSED, None)
    breaker = failing(FAILURES - 1, breaker.answered())
    assert breaker.state is State.CLOSED
    breaker = failing(1, breaker)
    assert (breaker.state, breaker.admits, breaker.why) == (State.OPEN, 0, "http_503")


def test_one_time_out_opens_it() -> None:
    assert failing(1, at_once=True).state is State.OPEN


def test_many_failures_at_once_open_it_once() -> None:
    assert failing(16) == failing(FAILURES)
    assert failing(16).probe_at == NOW + FIRST_WAIT


def test_it_is_probed_after_the_wait_and_once_at_a_time() -> None:
    breaker = failing(FAILURES)
    assert not breaker.due(NOW + FIRST_WAIT - 0.01)
    assert breaker.due(NOW + FIRST_WAIT)
    assert not breaker.probing().due(NOW + 100)
    assert not Breaker().due(NOW)
    assert not half_open().due(NOW + 100)


def test_the_wait_doubles_with_each_probe_that_fails_and_has_an_end() -> None:
    breaker, now, waits = failing(FAILURES), NOW, list[float]()
    for _ in range(10):
        waits.append(breaker.probe_at - now)
        now = breaker.probe_at
        breaker = breaker.probing().probed(breaker.epoch, now, "hangs")
    assert waits == [1, 2, 4, 8, 16, 32, 60, 60, 60, 60]
    assert (breaker.state, breaker.why) == (State.OPEN, "hangs")


def test_half_open_lets_one_request_through_whose_answer_closes_it() -> None:
    breaker = half_open()
    assert (breaker.state, breaker.admits) == (State.HALF_OPEN, 1)
    breaker = breaker.sent(NOW)
    assert breaker.admits == 0
    assert breaker.answered().admits is None
    assert failing(FAILURES, breaker.answered()).wait == FIRST_WAIT


def test_the_request_that_half_open_let_through_opens_it_again_with_the_doubled_wait() -> None:
    breaker = failing(1, half_open().sent(NOW))
    assert (breaker.state, breaker.wait, breaker.probe_at) == (State.OPEN, 2 * FIRST_WAIT, NOW + 2 * FIRST_WAIT)
    assert breaker.due(breaker.probe_at), "no probe is on its way"


def test_an_engine_that_passes_its_probes_is_tried_at_least_every_ten_seconds_until_an_answer() -> None:
    def passed(breaker: Breaker) -> Breaker:
        return breaker.probing().probed(breaker.epoch, NOW, "")

    breaker, waits = failing(FAILURES), list[float]()
    for _ in range(7):
        waits.append(breaker.wait)
        breaker = failing(1, passed(breaker).sent(NOW))
    assert waits == [1, 2, 4, 8, 10, 10, 10]
    waits = []
    for _ in range(4):
        breaker = breaker.probing().probed(breaker.epoch, NOW, "hangs")
        waits.append(breaker.wait)
    assert waits == [20, 40, 60, 60], "probes that fail say more"
    assert failing(1, passed(breaker).sent(NOW)).wait == LONGEST_TRIED_WAIT
    lost = passed(breaker).sent(NOW).waited(NOW + ANSWER_SECONDS)
    assert (lost.state, lost.wait) == (State.OPEN, LONGEST_TRIED_WAIT)
    assert failing(FAILURES, passed(breaker).sent(NOW).answered()).wait == FIRST_WAIT


@pytest.mark.parametrize("sent", [False, True])
def test_requests_of_before_say_nothing_about_an_engine_that_came_back(sent: bool) -> None:
    before = Breaker().epoch
    tried = half_open().sent(NOW) if sent else half_open()
    assert tried.failed(before, NOW, "timeout", at_once=True) == tried
    closed = tried.answered()
    assert closed.failed(before, NOW, "timeout", at_once=True) == closed
    assert closed.failed(tried.epoch, NOW, "timeout", at_once=True) == closed


def test_an_engine_that_was_started_again_after_it_failed_is_tried_as_after_a_probe() -> None:
    tried = Breaker.tried()
    assert (tried.state, tried.admits, tried.due(NOW + 100)) == (State.HALF_OPEN, 1, False)
    sent = tried.sent(NOW)
    assert sent.admits == 0
    assert sent.answered() == Breaker(epoch=sent.epoch + 1)
    opened = failing(1, sent)
    assert (opened.state, opened.wait, opened.why) == (State.OPEN, FIRST_WAIT, "http_503")


@pytest.mark.parametrize("breaker", [half_open(), Breaker.tried()])
def test_a_request_that_tries_an_engine_and_is_lost_has_it_probed_again(breaker: Breaker) -> None:
    assert breaker.waited(NOW + 1000) == breaker, "nothing was sent"
    sent = breaker.sent(NOW)
    assert sent.waited(NOW + ANSWER_SECONDS - 0.01) == sent
    late = NOW + ANSWER_SECONDS
    opened = sent.waited(late)
    assert (opened.state, opened.probe_at) == (State.OPEN, late + opened.wait)
    assert "without an answer" in opened.why
    assert opened.due(opened.probe_at)
    assert opened.failed(sent.epoch, late, "timeout", at_once=True) == opened, "it failed after all"
    assert opened.answered().state is State.CLOSED, "it was only late"
    assert Breaker().sent(NOW).waited(NOW + 1000) == Breaker(), "one that is closed waits for nothing"


def test_an_answer_of_before_shows_the_engine_computing_and_a_probe_of_before_is_forgotten() -> None:
    probed = failing(FAILURES).probing()
    closed = probed.answered()
    assert closed.state is State.CLOSED
    assert closed.probed(probed.epoch, NOW, "") == closed.probed(probed.epoch, NOW, "late") == closed
    again = failing(FAILURES, closed)
    assert again.probed(probed.epoch, NOW, "") == again
    assert again.due(NOW + FIRST_WAIT)


steps = st.lists(
    st.tuples(
        st.sampled_from(["send", "answer", "fail", "hang", "lose", "look", "probe ok", "probe bad"]), st.floats(0, 90)
    ),
    max_size=80,
)


@given(st.sampled_from([Breaker(), Breaker.tried()]), steps)
def test_whatever_happens_it_lets_through_what_its_state_says_and_never_gets_stuck(
    breaker: Breaker, steps: list[tuple[str, float]]
) -> None:
    now = NOW
    flying = list[int]()  # epochs of the requests in flight, oldest first
    lost = list[int]()  # of those whose answer never comes
    probes = list[int]()
    tripped = sent_at = NOW
    for what, seconds in steps:
        now += seconds
        before = breaker
        match what:
            case "send" if breaker.admits != 0:
                flying.append(breaker.epoch)
                breaker = breaker.sent(now)
                sent_at = now
            case "answer" if flying:
                flying.pop(0)
                breaker = breaker.answered()
                assert breaker.admits is None
            case "fail" | "hang" if flying:
                breaker = breaker.failed(flying.pop(0), now, what, at_once=what == "hang")
            case "lose" if flying:
                lost.append(flying.pop(0))
            case "look" if breaker.due(now):
                assert now >= tripped + FIRST_WAIT
                probes.append(breaker.epoch)
                breaker = breaker.probing()
            case "look":
                breaker = breaker.waited(now)
                assert breaker == before or now >= sent_at + ANSWER_SECONDS
            case "probe ok" | "probe bad" if probes:
                breaker = breaker.probed(probes.pop(0), now, "" if what == "probe ok" else "bad")
        assert (breaker.epoch != before.epoch) >= (breaker.state != before.state)
        if breaker.state is State.OPEN and breaker.epoch != before.epoch:
            tripped = now
            assert FIRST_WAIT <= breaker.wait <= LONGEST_WAIT
            longest = LONGEST_TRIED_WAIT if before.state is State.HALF_OPEN else LONGEST_WAIT
            assert breaker.wait == (min(longest, 2 * before.wait) if before.wait else FIRST_WAIT)
        if breaker.state is State.HALF_OPEN:
            tries = flying.count(breaker.epoch) + lost.count(breaker.epoch)
            assert tries + (breaker.admits or 0) == 1, "one request, or room for it"
            assert breaker.admits == 1 or breaker.waited(sent_at + ANSWER_SECONDS).state is State.OPEN
        # What it waits for is on its way, or is begun at the next look.
        if breaker.state is State.OPEN:
            assert breaker.epoch in probes or breaker.due(breaker.probe_at)

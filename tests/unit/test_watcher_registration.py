from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.errors import IllegalTransition
from headrace_watcher.registration import TRANSITIONS, Event, Registration, State, backoff, next_state
from tests.support.watched import make_card

CARD = make_card()
NEW_BOOT = make_card(boot="anotherboot1")

Step = Callable[[Registration], Registration]


def card(value: Any = CARD) -> Step:
    return lambda registration: registration.see_card(value)


def health(problem: str = "") -> Step:
    return lambda registration: registration.see_health(problem)


def proven() -> Step:
    return lambda registration: registration.proven()


def unproven(now: float = 0.0) -> Step:
    return lambda registration: registration.unproven("no dump", now)


def after(*steps: Step) -> Registration:
    registration = Registration()
    for step in steps:
        registration = step(registration)
    return registration


@pytest.mark.parametrize(
    ("steps", "state"),
    [
        ([], State.NO_CARD),
        ([health()], State.NO_CARD),
        ([card()], State.WAITING),
        ([card(), health("503")], State.WAITING),
        ([card(), health()], State.PROVING),
        ([card(), health(), proven()], State.REGISTERED),
        ([card(), health(), unproven()], State.WAITING),
        ([card(), health(), unproven(), health()], State.PROVING),
        ([card(), health(), proven(), health()], State.REGISTERED),
        ([card(), health(), proven(), health("503")], State.REGISTERED),
        ([card(), health(), proven(), health("503"), health("503")], State.WAITING),
        ([card(), health(), proven(), health("503"), health(), health("503")], State.REGISTERED),
        ([card(), health(), proven(), card()], State.REGISTERED),
        ([card(), health(), proven(), card(NEW_BOOT)], State.WAITING),
        ([card(), health(), proven(), card(None)], State.NO_CARD),
        ([card(), health(), card(NEW_BOOT)], State.WAITING),
        ([card(), health(), card(None)], State.NO_CARD),
        ([card(), health(), health("503"), health("503")], State.WAITING),
    ],
)
def test_an_engine_goes_this_way(steps: list[Step], state: State) -> None:
    assert after(*steps).state is state


def test_every_state_knows_every_event_or_refuses_it() -> None:
    assert set(TRANSITIONS) == set(State)
    for state in State:
        for event in Event:
            if event in TRANSITIONS[state]:
                assert next_state(state, event) is TRANSITIONS[state][event]
            else:
                with pytest.raises(IllegalTransition, match=f"{state} cannot be {event}"):
                    next_state(state, event)


@pytest.mark.parametrize("state", [State.NO_CARD, State.WAITING, State.REGISTERED])
def test_a_canary_proves_nothing_unless_one_is_awaited(state: State) -> None:
    registration = replace(Registration(), state=state, card=CARD)
    with pytest.raises(IllegalTransition):
        registration.proven()
    with pytest.raises(IllegalTransition):
        registration.unproven("no dump", 0.0)


def test_another_life_of_the_engine_starts_with_nothing_held_against_it() -> None:
    failed = after(card(), health(), unproven(), health(), unproven())
    assert failed.failures == 2
    anew = failed.see_card(NEW_BOOT)
    assert (anew.failures, anew.not_before, anew.misses) == (0, 0.0, 0)


def test_canaries_wait_longer_each_time_and_a_minute_at_most() -> None:
    assert [backoff(failures) for failures in (0, 1, 2, 3, 6, 7, 50)] == [0, 1, 2, 4, 32, 60, 60]
    failed = after(card(), health(), unproven(now=100.0), health())
    assert not failed.may_send(100.9)
    assert failed.may_send(101.0)


def test_only_a_registered_engine_has_nothing_missing() -> None:
    registered = after(card(), health(), proven())
    assert (registered.engine, registered.canary) == ("", "")
    for steps in ([], [card()], [card(), health()], [card(), health(), unproven()]):
        registration = after(*steps)
        assert registration.engine or registration.canary
    assert after(card(), health(), unproven()).canary == "no dump"
    assert after(card(), health(), proven(), health("503"), health("503")).engine == "503"


@given(st.lists(st.sampled_from([card(), card(NEW_BOOT), card(None), health(), health("503"), proven(), unproven()])))
def test_an_engine_is_registered_only_after_a_canary_of_its_present_life(steps: list[Step]) -> None:
    registration, proven_card = Registration(), None
    for step in steps:
        try:
            following = step(registration)
        except IllegalTransition:
            continue
        if following.is_registered and not registration.is_registered:
            proven_card = following.card
        registration = following
        if registration.is_registered:
            assert registration.card is not None
            assert registration.card == proven_card


def test_what_is_missing_is_the_engine_first_then_the_canary_then_nothing() -> None:
    assert "no engine has started" in after().missing
    assert after(lambda registration: registration.see_card(None, "a seam is missing")).missing == "a seam is missing"
    assert after(card()).missing == "its health was not checked yet"
    assert after(card(), health()).missing == "not sent yet"
    assert after(card(), health(), unproven()).missing == "no dump"
    assert after(card(), health(), proven()).missing == ""

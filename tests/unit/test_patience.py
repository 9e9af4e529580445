"""When leases that lapsed count as lapsed."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from headrace_dispatcher.patience import Patience

NEW = Patience(wait=60, silence=10)
CALM = replace(NEW, server="a", since=100.0, last=200.0)


def test_nothing_lapses_within_the_longest_lease_of_the_start() -> None:
    patience = NEW.begun("a", 1000)
    assert patience.lapsed_before == 0
    for now in range(1005, 1060, 5):
        patience = patience.begun("a", now)
        assert patience.lapsed_before == 0
    assert patience.begun("a", 1060).lapsed_before == 1060


def test_what_ended_before_the_pass_has_lapsed() -> None:
    assert CALM.begun("a", 205).lapsed_before == 205


def test_an_absence_begins_anew() -> None:
    patience = CALM.lost().begun("a", 202)
    assert patience.lapsed_before == 0
    assert patience.since == 202


def test_another_life_of_the_server_begins_anew() -> None:
    assert CALM.begun("b", 202).lapsed_before == 0


def test_a_silence_begins_anew_and_a_clock_that_was_set_back_too() -> None:
    assert CALM.begun("a", 211).lapsed_before == 0
    assert CALM.begun("a", 199).lapsed_before == 0


def test_a_long_pass_is_no_silence() -> None:
    assert CALM.begun("a", 205).ended(290).begun("a", 295).lapsed_before == 295


@given(st.lists(st.tuples(st.sampled_from("ab"), st.floats(0, 100), st.booleans()), max_size=60))
def test_a_lease_lapses_only_after_a_calm_of_the_longest_lease(steps: list[tuple[str, float, bool]]) -> None:
    patience, now, server = NEW, 1000.0, ""
    calm_since = now
    for name, seconds, lost in steps:
        now += seconds
        if lost:
            patience, server = patience.lost(), ""
            continue
        if name != server or seconds > NEW.silence:
            calm_since = now
        patience, server = patience.begun(name, now), name
        assert patience.lapsed_before == (now if now - calm_since >= NEW.wait else 0)

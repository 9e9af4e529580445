"""When the latest verdicts pause a run, and how it is said."""

from __future__ import annotations

from headrace.bus.values import Window
from headrace_dispatcher.mismatches import MismatchLimit

LIMIT = MismatchLimit(share=0.05, least=50)


def window(verdicts: int, **reasons: int) -> Window:
    return Window(since=7, verdicts=verdicts, mismatches=sum(reasons.values()), reasons=reasons)


def test_a_window_within_the_limit_says_nothing() -> None:
    assert LIMIT.passed_by(window(0)) == ""
    assert LIMIT.passed_by(window(50, token_content=2)) == ""


def test_the_rate_the_window_and_the_most_frequent_reasons_are_named() -> None:
    said = LIMIT.passed_by(window(50, not_finite=1, token_content=5))
    assert said == "mismatch rate 12.0 % of the last 50 verdicts (token_content 5, not_finite 1), limit 5 %"
    many = LIMIT.passed_by(window(80, layers=1, shape=9, corrupt=2, not_finite=4))
    assert "(shape 9, not_finite 4, corrupt 2)" in many


def test_a_window_that_is_not_full_yet_says_how_many_verdicts_the_limit_is_over() -> None:
    said = LIMIT.passed_by(window(4, token_content=3))
    assert said == "mismatch rate 75.0 % of the last 4 verdicts (token_content 3), limit 5 % of 50 verdicts"


def test_a_limit_of_one_never_pauses() -> None:
    assert MismatchLimit(share=1, least=1).passed_by(window(100, token_content=100)) == ""

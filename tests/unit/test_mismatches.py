"""When the latest verdicts pause a run, and how it is said."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

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
    assert said == (
        "mismatch rate 12.0 % of the last 50 samples' first attempts (token_content 5, not_finite 1), limit 5 %"
    )
    many = LIMIT.passed_by(window(80, layers=1, shape=9, corrupt=2, not_finite=4))
    assert "(shape 9, not_finite 4, corrupt 2)" in many


def test_a_window_that_is_not_full_yet_says_how_many_attempts_the_limit_is_over() -> None:
    said = LIMIT.passed_by(window(4, token_content=3))
    assert (
        said == "mismatch rate 75.0 % of the last 4 samples' first attempts (token_content 3), limit 5 % of at least 50"
    )


def test_mismatches_whose_verdicts_were_counted_before_the_window_are_all_of_it() -> None:
    said = LIMIT.passed_by(window(0, corrupt=3))
    assert said == "mismatch rate 100.0 % of the last 3 samples' first attempts (corrupt 3), limit 5 % of at least 50"
    assert "100.0 % of the last 3 " in LIMIT.passed_by(window(1, corrupt=3))


def test_a_limit_of_one_never_pauses() -> None:
    for verdicts in (0, 1, 100):
        assert MismatchLimit(share=1, least=1).passed_by(window(verdicts, token_content=100)) == ""


@given(
    verdicts=st.integers(0, 200),
    mismatches=st.integers(0, 200),
    share=st.floats(0, 1, exclude_min=True),
    least=st.integers(1, 100),
)
def test_whatever_a_window_holds_the_rate_is_a_share_above_the_limit(
    verdicts: int, mismatches: int, share: float, least: int
) -> None:
    said = MismatchLimit(share=share, least=least).passed_by(window(verdicts, shape=mismatches))
    judged = max(verdicts, mismatches)
    over = bool(mismatches) and mismatches / max(judged, least) > share + 1e-9
    assert bool(said) == over or abs(mismatches - share * max(judged, least)) < 1e-5
    if said:
        assert said.startswith(f"mismatch rate {100 * mismatches / judged:.1f} % of the last {judged} ")

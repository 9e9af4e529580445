"""Which samples go to a site now."""

from __future__ import annotations

from collections.abc import Iterator

from hypothesis import given
from hypothesis import strategies as st

from headrace.flow import Caps, Room
from headrace_dispatcher.plan import Fit, Limits, Nowhere, choose, dump_bytes

HERE = Limits(caps=Caps(requests=4, tokens=100, dump_bytes=1 << 20), context_length=80, bytes_per_token=1000)
LARGER = Limits(caps=Caps(requests=4, tokens=1000, dump_bytes=1 << 30), context_length=800, bytes_per_token=1000)
ALL = Room(requests=4, tokens=100, dump_bytes=1 << 20)


def test_what_fits_goes_now_and_the_room_shrinks() -> None:
    assert list(choose([40, 40, 40], ALL, HERE, [])) == [Fit.NOW, Fit.NOW]


def test_behind_one_that_waits_all_wait_and_are_not_even_read() -> None:
    def lengths() -> Iterator[int]:
        yield from (40, 70)
        raise AssertionError("read on")

    assert list(choose(lengths(), ALL, HERE, [])) == [Fit.NOW]


def test_a_sample_that_fits_no_site_blocks_nobody() -> None:
    assert list(choose([500, 10], ALL, HERE, [])) == [Fit.NOWHERE, Fit.NOW]


def test_a_sample_that_another_site_can_take_is_passed_over() -> None:
    assert list(choose([500, 10], ALL, HERE, [LARGER])) == [Fit.ELSEWHERE, Fit.NOW]


def test_the_context_length_bounds_a_prompt() -> None:
    assert list(choose([81], ALL, HERE, [])) == [Fit.NOWHERE]


def test_a_sample_is_due_when_it_fitted_no_site_for_so_long_without_a_break() -> None:
    nowhere = Nowhere(patience=30)
    assert nowhere.due("a", {1, 2}, 0) == []
    assert nowhere.due("a", {1}, 20) == []  # a site took 2 in
    assert nowhere.due("a", {1, 2}, 30) == [1]
    assert nowhere.due("a", {2}, 59) == []
    assert nowhere.due("a", {2}, 60) == [2]


def test_runs_are_apart_and_forgotten() -> None:
    nowhere = Nowhere(patience=30)
    nowhere.due("a", {1}, 0)
    nowhere.due("b", {1}, 20)
    nowhere.forget("a")
    assert nowhere.due("a", {1}, 40) == []
    assert nowhere.due("b", {1}, 50) == [1]


@given(st.lists(st.integers(1, 200), max_size=20), st.integers(0, 5), st.integers(0, 200), st.integers(0, 1 << 20))
def test_never_more_than_the_room(lengths: list[int], requests: int, tokens: int, size: int) -> None:
    room = Room(requests=requests, tokens=tokens, dump_bytes=size)
    now = [n for n, fit in zip(lengths, choose(lengths, room, HERE, []), strict=False) if fit is Fit.NOW]
    assert len(now) <= requests
    assert sum(now) <= tokens
    assert sum(dump_bytes(n, HERE) for n in now) <= size

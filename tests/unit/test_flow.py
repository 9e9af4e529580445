from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from headrace.flow import Caps, Load, Room, can_ever_fit, feed_size, room, too_many_mismatches

sizes = st.integers(0, 1 << 40)
caps_of = st.builds(Caps, requests=sizes, tokens=sizes, dump_bytes=sizes)
loads = st.builds(Load, requests=sizes, tokens=sizes, promised_bytes=sizes, measured_bytes=sizes)
costs = st.tuples(st.integers(1, 1 << 20), st.integers(1, 1 << 30))


@given(caps=caps_of, load=loads, cost=costs)
def test_room_is_never_negative_and_taking_some_never_makes_more(caps: Caps, load: Load, cost: tuple[int, int]) -> None:
    free = room(caps, load)
    left = free.less(*cost)
    for now, then in zip(
        (free.requests, free.tokens, free.dump_bytes), (left.requests, left.tokens, left.dump_bytes), strict=True
    ):
        assert 0 <= then <= now


@given(caps=caps_of, load=loads, costs=st.lists(costs, max_size=8))
def test_what_is_taken_only_where_it_fits_never_passes_a_cap(
    caps: Caps, load: Load, costs: list[tuple[int, int]]
) -> None:
    free = room(caps, load)
    requests, tokens, nbytes = load.requests, load.tokens, load.promised_bytes + load.measured_bytes
    for cost in costs:
        if free.fits(*cost):
            free = free.less(*cost)
            requests, tokens, nbytes = requests + 1, tokens + cost[0], nbytes + cost[1]
            assert (requests <= caps.requests, tokens <= caps.tokens, nbytes <= caps.dump_bytes) == (True, True, True)


@given(caps=caps_of, load=loads, cost=costs)
def test_what_can_never_fit_does_not_fit_now(caps: Caps, load: Load, cost: tuple[int, int]) -> None:
    empty = Load(requests=0, tokens=0, promised_bytes=0, measured_bytes=0)
    assert can_ever_fit(caps, *cost) == room(caps, empty).fits(*cost)
    assert can_ever_fit(caps, *cost) or not room(caps, load).fits(*cost)


def test_the_folder_counts_what_it_measures_and_what_is_promised() -> None:
    caps = Caps(requests=4, tokens=100, dump_bytes=1000)
    load = Load(requests=1, tokens=30, promised_bytes=300, measured_bytes=250)
    assert room(caps, load) == Room(requests=3, tokens=70, dump_bytes=450)
    assert room(caps, load).fits(70, 450)
    assert not room(caps, load).fits(71, 1)
    assert not room(caps, load).fits(1, 451)


@given(window=st.integers(0, 5000), waiting=st.integers(0, 5000), batch=st.integers(0, 500))
def test_feeding_fills_the_window_and_no_more(window: int, waiting: int, batch: int) -> None:
    size = feed_size(window, waiting, batch)
    assert 0 <= size <= batch
    assert size == 0 or waiting + size <= window


def test_mismatches_are_too_many_as_soon_as_nothing_that_follows_can_mend_it() -> None:
    assert not too_many_mismatches(50, 2, limit=0.05, least=50)
    assert too_many_mismatches(50, 3, limit=0.05, least=50)
    assert too_many_mismatches(3, 3, limit=0.05, least=50)
    assert not too_many_mismatches(2, 2, limit=0.05, least=50)
    assert too_many_mismatches(1, 1, limit=0.5, least=1)
    assert not too_many_mismatches(100, 29, limit=0.29, least=1), "0.29 * 100 is a little less than 29"


@given(
    verdicts=st.integers(0, 300),
    mismatches=st.integers(0, 300),
    limit=st.floats(0, 1, exclude_min=True),
    least=st.integers(1, 100),
)
def test_a_run_of_too_many_mismatches_would_be_over_the_limit_at_the_least_count_whatever_followed(
    verdicts: int, mismatches: int, limit: float, least: int
) -> None:
    judged = max(verdicts, mismatches)  # the verdicts of some mismatches may have been counted earlier
    matches_follow = max(judged, least)
    too_many = too_many_mismatches(verdicts, mismatches, limit=limit, least=least)
    assert too_many == too_many_mismatches(matches_follow, mismatches, limit=limit, least=least)
    if too_many:
        assert mismatches / matches_follow > limit
    elif judged >= least:
        assert mismatches / judged <= limit + 1e-6
    assert not too_many_mismatches(verdicts, mismatches, limit=1.0, least=least)

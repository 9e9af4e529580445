"""The engine's steps: who computes how much, and when a request is over."""

from __future__ import annotations

from collections import deque
from concurrent.futures import Future

from hypothesis import given
from hypothesis import strategies as st
from transformers import DynamicCache

from headrace_engine.steps import Request, plan


def request(tokens: int, new: int = 0, computed: int = 0) -> Request:
    return Request(
        rid=f"r{tokens}",
        prompt=tuple(range(tokens)),
        max_new_tokens=new,
        stop_tokens=frozenset({2}),
        cache=DynamicCache(),
        answer=Future(),
        computed=computed,
    )


def rows(chunks: list) -> list[int]:  # type: ignore[type-arg]
    return [chunk.rows for chunk in chunks]


def test_the_last_prompt_of_a_step_is_cut_where_the_budget_ends() -> None:
    waiting = [request(3), request(4), request(9)]
    assert rows(plan(waiting, [], budget=10, max_running=8)) == [3, 4, 3]


def test_no_prompt_is_begun_without_budget() -> None:
    assert rows(plan([request(10), request(1)], [], budget=10, max_running=8)) == [10]


def test_those_that_decode_ride_behind_the_prompts_and_count_as_running() -> None:
    decoding = [request(1, new=9, computed=1), request(2, new=9, computed=2)]
    chunks = plan([request(5), request(6)], decoding, budget=100, max_running=3)
    assert rows(chunks) == [5, 1, 1]
    assert [chunk.request for chunk in chunks[1:]] == decoding


def test_a_prompt_without_new_tokens_wants_no_logits() -> None:
    assert not request(5).wants_token(5)
    assert request(5, new=1).wants_token(5)
    assert not request(5, new=1).wants_token(4)


def test_a_request_ends_by_length_or_by_a_stop_token() -> None:
    none, one, stopped = request(3), request(3, new=1), request(3, new=9)
    assert none.finish_reason() is None
    none.advance(3, None)
    assert none.finish_reason() == {"type": "length", "length": 0}
    one.advance(3, 7)
    assert one.finish_reason() == {"type": "length", "length": 1}
    stopped.advance(3, 7)
    assert stopped.finish_reason() is None
    assert list(stopped.next_tokens(1)) == [7]
    stopped.advance(1, 2)
    assert stopped.finish_reason() == {"type": "stop", "matched": 2}


@given(
    lengths=st.lists(st.integers(1, 50), min_size=1, max_size=20),
    budget=st.integers(1, 40),
    max_running=st.integers(1, 6),
)
def test_every_prompt_is_computed_once_in_order_and_at_most_one_is_half_done(
    lengths: list[int], budget: int, max_running: int
) -> None:
    waiting = deque(request(length) for length in lengths)
    everyone = list(waiting)
    steps = 0
    while waiting:
        chunks = plan(waiting, [], budget=budget, max_running=max_running)
        assert 0 < sum(rows(chunks)) <= budget
        assert len(chunks) <= max_running
        assert chunks[0].request is waiting[0]
        for chunk in chunks:
            assert list(chunk.request.next_tokens(chunk.rows)) == list(
                range(chunk.request.computed, chunk.request.computed + chunk.rows)
            )
            chunk.request.advance(chunk.rows, None)
        while waiting and not waiting[0].prompt_left:
            waiting.popleft()
        assert sum(0 < each.computed < len(each.prompt) for each in everyone) <= 1
        steps += 1
    assert all(each.computed == len(each.prompt) for each in everyone)
    assert steps <= sum(lengths)

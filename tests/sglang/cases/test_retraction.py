"""Requests that the scheduler takes back: their chunks come again, in part, in another order, or later."""

from __future__ import annotations

import pytest

from headrace.reasons import Reason
from tests.sglang.cases import provoking
from tests.sglang.cases.asking import Prompt, meta
from tests.sglang.cases.rig import CHUNK, MAIN, POOL, RUNNING, Piece, Rig
from tests.support.waiting import wait_until

pytestmark = pytest.mark.served(MAIN)
END = 2  # the tiny model's end of a sequence


def repeated(pieces: list[Piece]) -> int:
    """Rows that were computed more than once."""
    rows = [row for piece in pieces for row in range(piece.prefix, piece.prefix + piece.rows)]
    return len(rows) - len(set(rows))


@pytest.mark.parametrize("flush", [False, True])
def test_a_prompt_is_retracted_between_its_chunks(rig: Rig, flush: bool) -> None:
    prompt = rig.prompts.new(10 * CHUNK + 9)
    with rig.client.slowed():
        answer = rig.client.begin_capture(prompt)
        rig.wait_pieces(prompt.rid, 3)
        rig.client.pause("retract")
        if flush:
            assert rig.client.post("/flush_cache").status_code == 200
        rig.client.resume()
    header = rig.take(prompt)
    assert meta(answer.result())["num_retractions"] == 1
    pieces = rig.pieces(prompt.rid)
    assert header.parts == len(pieces) > 11
    # Without the flush, whole chunks are still in the radix cache, and those rows come never again.
    assert pieces[-1].prefix + pieces[-1].rows == len(prompt.ids)
    assert repeated(pieces) >= (3 * CHUNK if flush else 1)
    assert header.retractions == 1


def test_a_prompt_is_retracted_again_and_again(rig: Rig) -> None:
    prompt = rig.prompts.new(12 * CHUNK)
    with rig.client.slowed():
        answer = rig.client.begin_capture(prompt)
        for parts in (2, 5, 9):
            rig.wait_pieces(prompt.rid, parts)
            rig.client.pause("retract")
            rig.client.resume()
    rig.take(prompt)
    assert meta(answer.result())["num_retractions"] == 3


def test_a_pause_in_place(rig: Rig) -> None:
    prompt = rig.prompts.new(8 * CHUNK)
    with rig.client.slowed():
        answer = rig.client.begin_capture(prompt)
        rig.folder.wait_half(prompt.rid)
        rig.client.pause("in_place")
        rig.client.resume()
    assert rig.take(prompt).retractions == 0
    assert meta(answer.result())["num_retractions"] == 0


def test_a_prompt_that_another_overtakes_while_it_is_retracted(rig: Rig) -> None:
    first, second = rig.prompts.new(10 * CHUNK), rig.prompts.new(5 * CHUNK)
    with rig.client.slowed():
        answers = [rig.client.begin_capture(first)]
        rig.folder.wait_half(first.rid)
        answers.append(rig.client.begin_capture(second))
        wait_until(lambda: rig.waiting() == 1, what="the second one to wait")
        rig.client.pause("retract")
        rig.client.resume()
    rig.take(second)
    # The retracted one goes to the end of the queue. A half one may hold its room only until another is half there.
    lost = rig.take_lost(first)
    assert (lost.reason, second.rid in lost.detail) == (Reason.EVICTED, True)
    assert [meta(answer.result())["num_retractions"] for answer in answers] == [1, 0]
    assert repeated(rig.pieces(first.rid)) >= 1


def _generate_together(rig: Rig, prompts: list[Prompt], new_tokens: int) -> int:
    """Capture prompts that generate, all at once; how often one of them was retracted."""
    # For requests that ignore their end the scheduler sets all room aside, and need not retract any.
    sampling = {"max_new_tokens": new_tokens, "temperature": 0, "logit_bias": {str(END): -100}}
    rig.client.pause("in_place")
    answers = [rig.client.begin_capture(prompt, sampling_params=sampling) for prompt in prompts]
    rig.client.resume()
    rig.take_all(prompts, answers)
    tables = [meta(answer.result()) for answer in answers]
    assert all(table["completion_tokens"] == new_tokens for table in tables)
    return sum(int(table["num_retractions"]) for table in tables)


def test_requests_that_generate_are_retracted_by_sglangs_own_switch(rig: Rig) -> None:
    prompts = rig.prompts.some(6, CHUNK // 2, 3 * CHUNK)
    with rig.provoked(provoking.RETRACT):
        assert _generate_together(rig, prompts, 25) > 0
    # Some prompts were prefilled once more, with what they had generated.
    assert any(repeated(rig.pieces(prompt.rid)) for prompt in prompts)


def test_requests_that_generate_are_retracted_when_the_cache_is_full(rig: Rig) -> None:
    prompts, new_tokens = rig.prompts.some(10, 190, 200), 250
    assert sum(len(prompt.ids) + new_tokens for prompt in prompts) > POOL
    assert _generate_together(rig, prompts, new_tokens) > 0


def test_requests_that_generate_make_way_for_somebody_elses_of_a_higher_priority(rig: Rig) -> None:
    prompts = rig.prompts.some(RUNNING, 10, 20)
    running = [rig.client.begin_capture(prompt, 60) for prompt in prompts]
    wait_until(lambda: all(rig.pieces(prompt.rid) for prompt in prompts), what="all places to be taken")
    others = [rig.client.begin_generate(rig.prompts.ids(CHUNK), None, 5, priority=100) for _ in range(4)]
    rig.take_all(prompts, running)
    assert all(meta(answer.result())["num_retractions"] == 0 for answer in others)
    assert sum(meta(answer.result())["num_retractions"] for answer in running) > 0

"""Rows of generated tokens: others' and ours, beside prompts in one forward and alone."""

from __future__ import annotations

import pytest

from tests.sglang.cases.asking import meta
from tests.sglang.cases.rig import CHUNK, MAIN, Rig
from tests.support.waiting import wait_until

pytestmark = pytest.mark.served(MAIN)


def test_decode_rows_of_others_in_a_prompts_forward(rig: Rig) -> None:
    others = [f"other-{number}" for number in range(4)]
    running = [rig.client.begin_generate(rig.prompts.ids(20), rid, 150) for rid in others]
    wait_until(lambda: all(len(rig.pieces(rid)) > 2 for rid in others), what="others to generate")
    prompt = rig.prompts.new(6 * CHUNK)
    header = rig.capture(prompt)
    assert all(set(others) <= set(piece.others) for piece in rig.pieces(prompt.rid))
    assert all(rig.pieces(rid)[-1].mode == "DECODE" for rid in others)
    # A decode row takes a row of the budget away.
    assert header.parts > 6
    assert all(meta(answer.result())["completion_tokens"] == 150 for answer in running)


@pytest.mark.parametrize("new_tokens", [0, 1, 2, 7])
def test_generated_tokens_are_no_rows_of_ours(rig: Rig, new_tokens: int) -> None:
    prompt = rig.prompts.new(2 * CHUNK + 3)
    rig.capture(prompt, new_tokens)
    modes = [piece.mode for piece in rig.pieces(prompt.rid)]
    # The oldest version runs a step more than it needs.
    assert modes.count("DECODE") in (max(0, new_tokens - 1), new_tokens)


def test_our_own_decode_rows_in_the_forwards_of_other_prompts(rig: Rig) -> None:
    first = rig.prompts.new(CHUNK // 2)
    with rig.client.slowed(0.05):
        running = rig.client.begin_capture(first, 100)
        rig.take(first)
        prompts = rig.prompts.some(4, 2 * CHUNK, 4 * CHUNK)
        rig.take_all(prompts, [rig.client.begin_capture(prompt) for prompt in prompts])
    assert meta(running.result())["completion_tokens"] == 100
    decoded = [piece for piece in rig.pieces(first.rid) if piece.mode != "DECODE" and piece.prefix >= len(first.ids)]
    assert decoded, rig.pieces(first.rid)


def test_a_streamed_answer(rig: Rig) -> None:
    prompt = rig.prompts.new(CHUNK + 5)
    answer = rig.client.capture(prompt, 5, stream=True)
    assert answer.text.rstrip().endswith("[DONE]")
    rig.take(prompt)

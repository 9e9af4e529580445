"""Prompts that a server computes in pieces: by its chunk's size, or because a forward's budget ends inside them."""

from __future__ import annotations

import pytest

from tests.sglang.cases.rig import CHUNK, CONTEXT, MAIN, Rig

pytestmark = pytest.mark.served(MAIN)


@pytest.mark.parametrize("tokens", [1, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK, 13 * CHUNK + 7])
def test_a_prompt_in_chunks_is_put_together(rig: Rig, tokens: int) -> None:
    prompt = rig.prompts.new(tokens)
    header = rig.capture(prompt)
    assert [piece.prefix for piece in rig.pieces(prompt.rid)] == list(range(0, tokens, CHUNK))
    assert (header.parts, header.retractions) == (-(-tokens // CHUNK), 0)


def test_the_longest_prompt(rig: Rig) -> None:
    tokens = CONTEXT - 7  # SGLang keeps six positions, and refuses what would fill the rest
    assert rig.capture(rig.prompts.new(tokens)).parts == -(-tokens // CHUNK)


def test_prompts_shorter_than_a_chunk_are_split_between_forwards(rig: Rig) -> None:
    prompts = rig.prompts.some(48, CHUNK // 2, CHUNK)
    rig.client.pause("in_place")
    answers = [rig.client.begin_capture(prompt) for prompt in prompts]
    rig.client.resume()
    headers = rig.take_all(prompts, answers)
    assert max(header.tokens for header in headers) <= CHUNK
    split = [prompt for prompt, header in zip(prompts, headers, strict=True) if header.parts > 1]
    assert len(split) > 4
    assert all(any(piece.others for piece in rig.pieces(prompt.rid)) for prompt in split)


def test_a_list_of_prompts_in_one_request(rig: Rig) -> None:
    prompts = rig.prompts.some(5, 5, 3 * CHUNK)
    rids = [prompt.rid for prompt in prompts]
    answer = rig.client.generate([prompt.ids for prompt in prompts], rids, extra_key=rids)
    assert [entry["meta_info"]["id"] for entry in answer.json()] == rids
    for prompt in prompts:
        rig.take(prompt)


def test_prompts_of_all_lengths_at_once(rig: Rig) -> None:
    prompts = rig.prompts.some(24, 1, 5 * CHUNK)
    headers = rig.take_all(prompts, [rig.client.begin_capture(prompt) for prompt in prompts])
    assert max(header.parts for header in headers) > 1

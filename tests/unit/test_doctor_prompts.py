from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from headrace_cli.doctor.prompts import HIGHEST_ID, LOWEST_ID, Prompt, draw, lengths
from tests.support.bus_values import make_site

ROOMY = {"context_length": 4096, "max_tokens": 100_000, "dump_cap_bytes": 1 << 30}


def below(seed: int = 1) -> random.Random:
    return random.Random(seed)


def test_prompts_are_of_different_lengths_and_one_is_longer_than_a_chunk() -> None:
    chosen, missing = lengths(make_site(**ROOMY), 512)
    assert len(set(chosen)) == len(chosen) > 3
    assert max(chosen) > 512
    assert missing == ""


def test_an_engine_that_does_not_split_needs_no_longer_prompt() -> None:
    chosen, missing = lengths(make_site(**ROOMY), -1)
    assert max(chosen) <= 150
    assert missing == ""


@pytest.mark.parametrize(
    ("chunk", "changes", "why"),
    [
        (None, {}, "does not tell its chunk size"),
        (8192, {}, "takes none of 8249 tokens"),
        (2048, {"max_tokens": 2000}, "takes none of 2105 tokens"),
        (2048, {"hidden_size": 1 << 20, "dump_cap_bytes": 1 << 60}, "MiB of states"),
    ],
)
def test_why_no_prompt_is_longer_than_a_chunk_is_said(chunk: int | None, changes: dict[str, int], why: str) -> None:
    chosen, missing = lengths(make_site(**{**ROOMY, **changes}), chunk)
    assert chosen
    assert why in missing


def test_a_site_without_room_gets_no_prompt() -> None:
    assert lengths(make_site(max_tokens=4), 512)[0] == []


def test_a_prompt_is_random_and_ends_with_its_own_beginning() -> None:
    first, second = (draw(64, below(seed).randrange, lambda ids: 7, set()) for seed in (1, 2))
    assert first.token_ids != second.token_ids
    assert len(first.token_ids) == 64
    assert first.token_ids[-21:] == first.token_ids[:21]
    assert LOWEST_ID <= min(first.token_ids) <= max(first.token_ids) <= HIGHEST_ID


def test_a_prompt_with_a_new_next_token_is_looked_for_a_few_times() -> None:
    asked: list[Sequence[int]] = []

    def next_token(token_ids: Sequence[int]) -> int:
        asked.append(token_ids)
        return 5 if len(asked) < 3 else 6

    assert draw(16, below().randrange, next_token, {5}) == Prompt(token_ids=tuple(asked[2]), next_token=6)
    assert len(asked) == 3
    asked.clear()
    assert draw(16, below().randrange, lambda ids: 5, {5}).next_token == 5, "an untrained model may have but one"
    draw(5000, below().randrange, next_token, {5})
    assert len(asked) == 1, "a long prompt is asked for once"

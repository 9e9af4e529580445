"""The radix cache: rows that the server did not compute again are no rows of a dump."""

from __future__ import annotations

import pytest

from headrace.reasons import Reason
from tests.sglang.cases.asking import Prompt, meta
from tests.sglang.cases.rig import CHUNK, MAIN, Rig
from tests.sglang.env import NEWEST

pytestmark = pytest.mark.served(MAIN)


def sharing(rig: Rig, prefix: int, *rests: int) -> list[Prompt]:
    """Prompts of one prefix, with rests of these lengths."""
    shared = rig.prompts.ids(prefix)
    return [rig.prompts.of(shared + rig.prompts.ids(rest)) for rest in rests]


def test_prompts_that_share_a_prefix_are_whole_with_their_own_extra_key(rig: Rig) -> None:
    for prompt in sharing(rig, 3 * CHUNK, 1, 10, 2 * CHUNK, 0):
        assert meta(rig.client.capture(prompt))["cached_tokens"] == 0
        rig.take(prompt)


@pytest.mark.parametrize(("prefix", "rest"), [(1, 3 * CHUNK), (3 * CHUNK, 5), (2 * CHUNK, 2 * CHUNK), (3 * CHUNK, 0)])
def test_rows_from_the_cache_are_a_loss(rig: Rig, prefix: int, rest: int) -> None:
    first, second = sharing(rig, prefix, CHUNK, rest)
    assert meta(rig.client.capture(first, extra_key=None))["cached_tokens"] == 0
    rig.take(first)
    table = meta(rig.client.capture(second, extra_key=None))
    assert table["cached_tokens"] == prefix - (rest == 0)
    if rig.server.config.version == NEWEST:  # older ones have no word about a request as a whole in an answer
        assert f"dropped:{Reason.PREFIX_CACHED}" in table["headrace"]
    assert rig.take_lost(second).reason == Reason.PREFIX_CACHED


def test_the_prompts_of_others_are_in_no_cache_of_ours(rig: Rig) -> None:
    prompt = rig.prompts.new(2 * CHUNK)
    for _ in range(2):
        rig.client.generate(prompt.ids, None, 4)
    assert meta(rig.client.generate(prompt.ids, None, 4))["cached_tokens"] > CHUNK
    assert meta(rig.client.capture(prompt))["cached_tokens"] == 0
    rig.take(prompt)


def test_the_same_id_again_after_a_retraction_is_complete(rig: Rig) -> None:
    """Chunks of a retracted request stay in the cache under its own extra key, and its rows were taken before."""
    prompt = rig.prompts.new(6 * CHUNK)
    with rig.client.slowed():
        answer = rig.client.begin_capture(prompt)
        rig.folder.wait_half(prompt.rid)
        rig.client.pause("retract")
        rig.client.resume()
    rig.take_all([prompt], [answer])
    assert rig.pieces(prompt.rid)[-1].prefix > 0


def test_a_flush_in_the_middle(rig: Rig) -> None:
    first, second = sharing(rig, 4 * CHUNK, 3 * CHUNK, CHUNK)
    with rig.client.slowed():
        answer = rig.client.begin_capture(first, extra_key=None)
        rig.folder.wait_half(first.rid)
        assert rig.client.post("/flush_cache").status_code == 400  # not while something runs
    rig.take_all([first], [answer])
    assert rig.client.post("/flush_cache").status_code == 200
    assert meta(rig.client.capture(second, extra_key=None))["cached_tokens"] == 0
    rig.take(second)

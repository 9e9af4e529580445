"""Two ranks, each with all rows: one writes."""

from __future__ import annotations

from dataclasses import replace

import pytest

from headrace.dumps import ENGINE_FILE
from tests.sglang.cases.asking import meta
from tests.sglang.cases.rig import CHUNK, MAIN, Rig

pytestmark = pytest.mark.served(replace(MAIN, tp=2))


def test_prompts_of_all_lengths_with_others(rig: Rig) -> None:
    others = [rig.client.begin_generate(rig.prompts.ids(30), f"other-{number}", 60) for number in range(3)]
    prompts = rig.prompts.some(12, 1, 4 * CHUNK)
    headers = rig.take_all(prompts, [rig.client.begin_capture(prompt, len(prompt.ids) % 3) for prompt in prompts])
    assert max(header.parts for header in headers) > 1
    assert any("other-0" in piece.others for prompt in prompts for piece in rig.pieces(prompt.rid))
    assert all(meta(answer.result())["completion_tokens"] == 60 for answer in others)


def test_one_rank_alone_captures(rig: Rig) -> None:
    rig.capture(rig.prompts.new(2 * CHUNK))
    locks = [path.name for path in rig.folder.path.glob(".*.lock")]
    assert locks == [f".{rig.folder.card.boot}.lock"]
    assert "tp2" in rig.folder.card.fingerprint
    assert [path.name for path in rig.folder.path.glob("engine*")] == [ENGINE_FILE]


def test_a_retraction(rig: Rig) -> None:
    prompt = rig.prompts.new(8 * CHUNK)
    with rig.client.slowed():
        answer = rig.client.begin_capture(prompt)
        rig.wait_pieces(prompt.rid, 2)
        rig.client.pause("retract")
        rig.client.resume()
    rig.take_all([prompt], [answer])
    assert meta(answer.result())["num_retractions"] == 1


def test_an_abort(rig: Rig) -> None:
    prompt = rig.prompts.new(12 * CHUNK)
    with rig.client.slowed():
        answer = rig.client.begin_capture(prompt)
        rig.folder.wait_half(prompt.rid)
        rig.client.abort(prompt.rid)
        assert meta(answer.result())["finish_reason"]["type"] == "abort"
    assert rig.take_lost(prompt).reason == "aborted"

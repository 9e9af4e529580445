"""Requests that end before their prompt does: aborted, timed out, all at once; and what comes after them."""

from __future__ import annotations

import pytest
import requests

from headrace.reasons import Reason
from tests.sglang.cases.asking import meta
from tests.sglang.cases.rig import CHUNK, MAIN, Rig
from tests.support.waiting import wait_until

pytestmark = pytest.mark.served(MAIN)
LONG = 20 * CHUNK


def test_an_abort_in_the_queue_leaves_nothing(rig: Rig) -> None:
    first, queued = rig.prompts.new(6 * CHUNK), rig.prompts.new(3 * CHUNK)
    with rig.client.slowed():
        running = rig.client.begin_capture(first)
        rig.folder.wait_half(first.rid)
        answer = rig.client.begin_capture(queued)
        wait_until(lambda: rig.waiting() == 1, what="the second one to wait")
        rig.client.abort(queued.rid)
        assert meta(answer.result())["finish_reason"]["type"] == "abort"
    assert rig.pieces(queued.rid) == []
    rig.take_all([first], [running])


def test_an_abort_between_chunks_is_a_loss(rig: Rig) -> None:
    prompt = rig.prompts.new(LONG)
    with rig.client.slowed():
        answer = rig.client.begin_capture(prompt)
        rig.folder.wait_half(prompt.rid)
        rig.client.abort(prompt.rid)
        assert meta(answer.result())["finish_reason"]["type"] == "abort"
    assert 0 < len(rig.pieces(prompt.rid)) < LONG // CHUNK
    assert rig.take_lost(prompt).reason == Reason.ABORTED
    rig.capture(rig.prompts.of(prompt.ids))


def test_an_abort_of_everything(rig: Rig) -> None:
    first, queued = rig.prompts.new(LONG), rig.prompts.some(3, 1, 3 * CHUNK)
    with rig.client.slowed():
        answers = [rig.client.begin_capture(first)]
        rig.folder.wait_half(first.rid)
        answers += [rig.client.begin_capture(prompt) for prompt in queued]
        wait_until(lambda: rig.waiting() == len(queued), what="the others to wait")
        rig.client.abort(everything=True)
        assert all(meta(answer.result())["finish_reason"]["type"] == "abort" for answer in answers)
    assert rig.take_lost(first).reason == Reason.ABORTED
    assert all(rig.pieces(prompt.rid) == [] for prompt in queued)


def test_a_client_that_gives_up_is_an_abort(rig: Rig) -> None:
    prompt = rig.prompts.new(LONG)
    with rig.client.slowed(0.5):  # SGLang looks for closed connections every few seconds
        with pytest.raises(requests.Timeout):
            rig.client.capture(prompt, timeout=1.0)
        again = rig.client.capture(prompt)
        assert (again.status_code, "Duplicate request ID" in again.text) == (400, True)
        assert rig.take_lost(prompt).reason == Reason.ABORTED
    assert 0 < len(rig.pieces(prompt.rid)) < LONG // CHUNK
    rig.capture(rig.prompts.of(prompt.ids))
    # The same id once more: what is lost stays lost, since nobody waits for it any more.
    answer = rig.client.capture(prompt)
    assert answer.status_code == 200
    assert rig.pieces(prompt.rid)[-1].prefix > 0


def test_a_client_that_gives_up_late_is_captured_all_the_same(rig: Rig) -> None:
    prompt = rig.prompts.new(8 * CHUNK)
    with rig.client.slowed(0.15), pytest.raises(requests.Timeout):
        rig.client.capture(prompt, timeout=0.3)
    rig.take(prompt)

"""Writer threads that raise, and a folder that nobody empties: the engine goes on, counts, does not grow, recovers."""

from __future__ import annotations

import pytest

from headrace.reasons import Reason
from tests.sglang.cases import provoking
from tests.sglang.cases.rig import CHUNK, MAIN, Rig
from tests.sglang.cases.unharmed import Unharmed

pytestmark = pytest.mark.served(MAIN)


@pytest.mark.parametrize("error", ["RuntimeError", "MemoryError", "SystemExit"])
def test_writer_threads_that_raise(rig: Rig, error: str) -> None:
    engine = Unharmed(rig)
    with rig.provoked(provoking.BROKEN_WRITERS, error):
        lost = engine.capture(30)
    engine.assert_lost(lost, {Reason.INTERNAL})
    rig.folder.remove_notices()
    engine.assert_unharmed()


def test_writer_threads_that_raise_in_the_middle_of_a_prompt(rig: Rig) -> None:
    engine, prompt = Unharmed(rig), rig.prompts.new(8 * CHUNK)
    with rig.client.slowed():
        answer = rig.client.begin_capture(prompt)
        rig.folder.wait_half(prompt.rid)
        with rig.provoked(provoking.BROKEN_WRITERS, "RuntimeError"):
            rig.wait_pieces(prompt.rid, len(rig.pieces(prompt.rid)) + 2)
    assert answer.result().status_code == 200
    engine.assert_lost([prompt], {Reason.INTERNAL})
    rig.folder.remove_notices()
    engine.assert_unharmed()


def test_nobody_takes_the_dumps_away(rig: Rig) -> None:
    engine = Unharmed(rig)
    prompts = engine.capture(60)
    engine.assert_steady()
    for prompt in prompts:
        rig.take(prompt)
    engine.assert_unharmed()

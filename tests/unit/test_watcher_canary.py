from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from headrace.dumpfolder import read_dump
from headrace.verdicts import Reason
from headrace_watcher.canary import HIGHEST_ID, LOWEST_ID, TOKENS, Canary, explain
from tests.support.watched import make_card, publish


def make_canary(seed: int = 1) -> Canary:
    return Canary.make(make_card(), 60.0, random.Random(seed).randrange)


def test_a_canary_is_short_safe_and_never_the_same() -> None:
    first, second = make_canary(1), make_canary(2)
    assert first.request.is_canary
    assert len(first.token_ids) == TOKENS
    assert all(LOWEST_ID <= token <= HIGHEST_ID for token in first.token_ids)
    assert first.request != second.request


def test_a_canary_whose_states_came_passes(tmp_path: Path) -> None:
    canary = make_canary()
    assert canary.judge(read_dump(publish(tmp_path, canary.request, canary.token_ids))) is None


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"boundaries": (1, 3, 5)}, Reason.LAYERS),
        ({"final_state": "post_norm"}, Reason.LAYERS),
        ({"engine": "another"}, Reason.ENGINE_CHANGED),
        ({"weight_version": "another"}, Reason.WEIGHTS_CHANGED),
    ],
)
def test_a_canary_is_held_to_the_engines_own_card(tmp_path: Path, changes: dict[str, Any], reason: Reason) -> None:
    canary = make_canary()
    refusal = canary.judge(read_dump(publish(tmp_path, canary.request, canary.token_ids, **changes)))
    assert refusal is not None
    assert refusal.reason is reason


def test_a_canary_whose_tokens_changed_is_refused(tmp_path: Path) -> None:
    canary = make_canary()
    refusal = canary.judge(read_dump(publish(tmp_path, canary.request, [7] * TOKENS)))
    assert refusal is not None
    assert refusal.reason is Reason.TOKEN_CONTENT


def test_a_canary_that_did_not_come_says_what_to_check() -> None:
    canary = make_canary()
    assert "did not answer" in canary.overdue("/dumps")
    told = replace(canary, answered=True).overdue("/dumps")
    assert "plugin installed" in told
    assert "/dumps" in told


def test_every_refusal_is_explained_even_one_of_a_newer_plugin() -> None:
    for reason in Reason:
        assert reason in explain(reason, "detail")
    assert "disable-radix-cache" in explain(Reason.PREFIX_CACHED, "11 of 12 rows")
    assert "brand_new" in explain("brand_new", "detail")

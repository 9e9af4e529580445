"""The measurement of bench.strategies in small: a strategy against a patched engine, and headrace as served."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from bench.strategies.judging import Judge
from bench.strategies.trials import Conditions, run_headrace, run_naive
from tests.support.engine import random_ids

pytestmark = pytest.mark.pipeline

ALONE = Conditions(name="alone", concurrency=1, prefix_cache=10_000, step=1000, shared=False)
SERVED = replace(ALONE, name="served", concurrency=8, step=64, shared=True)
SYSTEM = random_ids(20, seed=99)
PROMPTS = [SYSTEM + random_ids(5 * length, seed=length) for length in range(1, 21)]


def test_a_strategy_has_the_one_prompt_right_whose_rows_were_all_computed(tiny: Path, tmp_path: Path) -> None:
    score = Judge(PROMPTS, tiny).score(run_naive("by token count", ALONE, PROMPTS, tiny, tmp_path))
    assert score.right == 1
    assert score.wrong == score.silent
    assert score.trial.short >= 19  # those that lack the system prompt's rows, and warm-ups that begin alike


def test_headrace_is_right_beside_others_with_a_prefix_cache_and_split_prompts(tiny: Path, tmp_path: Path) -> None:
    score = Judge(PROMPTS, tiny).score(run_headrace(SERVED, PROMPTS, tiny, tmp_path / "headrace"))
    assert (score.right, score.wrong, score.lost) == (20, 0, 0)
    assert (score.trial.refused, score.trial.again) == (0, 0)

"""The judge of bench.strategies: which rows are right, wrong, wrong with the right shape, or not there."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from bench.strategies.judging import Judge
from bench.strategies.samples import Prompts
from bench.strategies.trials import BOUNDARIES, Conditions, Trial
from tests.support.engine import random_ids
from tests.support.oracle import Oracle
from tests.support.tiny_models import tiny_llama


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("model"))


def test_rows_are_judged_by_the_model_and_not_by_their_shape(model: Path, tmp_path: Path) -> None:
    prompts = [random_ids(10, seed=seed) for seed in range(6)]
    oracle = Oracle(model, BOUNDARIES)
    states = [oracle.states(prompt) for prompt in prompts]
    nan = {name: torch.full_like(each, torch.nan) for name, each in states[5].items()}
    stored = [states[0], states[2], {name: each[4:] for name, each in states[2].items()}, None, states[4], nan]
    paths = [tmp_path / f"{number}.safetensors" for number in range(len(stored))]
    for path, row in zip(paths, stored, strict=True):
        if row is not None:
            save_file({name: each.contiguous() for name, each in row.items()}, path)
    conditions = Conditions(name="test", concurrency=1, prefix_cache=0, step=1, shared=False)
    rows = tuple(path if path.exists() else None for path in paths)
    trial = Trial(pairing="test", conditions=conditions, rows=rows, seconds=0.0, probes=0, chats=0)
    score = Judge(prompts, model).score(trial)
    assert (score.right, score.wrong, score.silent, score.lost) == (2, 3, 2, 1)
    assert score.as_dict()["wrong"] == 3


def test_prompts_follow_from_their_seed_and_share_beginnings_and_lengths() -> None:
    first, again, other = ([source.next() for _ in range(200)] for source in map(Prompts, (1, 1, 2)))
    assert first == again != other
    lengths = [len(prompt) for prompt in first]
    assert len(set(lengths)) < len(lengths)
    assert max(lengths) > 1024
    assert {tuple(prompt[:40]) for prompt in first} & {tuple(prompt[:40]) for prompt in other}

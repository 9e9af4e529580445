from __future__ import annotations

import numpy as np
import pytest

from headrace.errors import VerificationFailed
from headrace_cli.doctor.ranks import Last, final_kind, judge

VOCABULARY = 50


def row(next_token: int, *, seed: int = 0, behind: float = 0.0, best: int | None = None) -> Last:
    """Logits whose largest is `best`, by default the next token, which is `behind` it as a part of the spread."""
    logits = np.random.default_rng(seed).normal(size=VOCABULARY).astype(np.float32)
    first = next_token if best is None else best
    logits[first] = 20.0
    if first != next_token:
        for _ in range(20):  # the mean depends on what is set
            logits[next_token] = 20.0 - behind * (20.0 - float(logits.mean()))
    return Last(tokens=5 + seed, logits=logits, next_token=next_token)


def test_the_servers_own_tokens_prove_the_states() -> None:
    finding = judge([row(3), row(7, seed=1), row(9, seed=2)], "F32")
    assert finding.ok
    assert "3 of 3 rows, 3 different" in finding.what


@pytest.mark.parametrize(("dtype", "behind"), [("BF16", 0.04), ("F16", 0.008), ("F32", 0.00008)])
def test_a_tie_that_rounding_leaves_is_accepted_and_said(dtype: str, behind: float) -> None:
    finding = judge([row(3), row(7, seed=1, behind=behind, best=8)], dtype)
    assert finding.ok
    assert "1 of them within" in finding.what
    assert dtype in finding.what


@pytest.mark.parametrize(("dtype", "behind"), [("BF16", 0.06), ("F16", 0.012), ("F32", 0.00012)])
def test_what_is_no_tie_is_wrong(dtype: str, behind: float) -> None:
    finding = judge([row(3), row(7, seed=1, behind=behind, best=8)], dtype)
    assert finding.ok is False
    assert finding.error is VerificationFailed
    assert "after 6 tokens the server says 7, which ranks 2 of 50; 8 ranks first" in finding.fix


def test_the_token_of_another_request_names_that() -> None:
    finding = judge([row(3), row(7, seed=1, behind=0.5, best=3)], "BF16")
    assert finding.ok is False
    assert "as after the 5 tokens of another request" in finding.fix


def test_a_token_beyond_the_head_is_another_models() -> None:
    finding = judge([row(3), Last(tokens=4, logits=row(3).logits, next_token=VOCABULARY)], "BF16")
    assert finding.ok is False
    assert "--model" in finding.fix


def test_a_check_that_every_state_would_pass_says_that_it_tells_nothing() -> None:
    assert judge([row(3), row(3, seed=1), row(3, seed=2)], "F32").ok is None
    flat = [Last(tokens=5, logits=np.zeros(VOCABULARY, np.float32), next_token=token) for token in (1, 2)]
    assert judge(flat, "F32").ok is None
    assert judge([row(3)], "F32").ok is None


def test_what_the_norm_gave_has_size_one_without_its_weight() -> None:
    rng = np.random.default_rng(1)
    weight = rng.uniform(0.1, 9, 64).astype(np.float32)
    before = rng.normal(size=(100, 64)).astype(np.float32) * rng.uniform(1, 50, (100, 1)).astype(np.float32)
    after = before / np.sqrt(np.square(before).mean(-1, keepdims=True)) * weight

    def kind(final_state: str, states: np.ndarray) -> bool:
        return final_kind(final_state, np.sqrt(np.square(states / weight).mean(-1)))[0]

    assert kind("post_norm", after)
    assert not kind("pre_norm", after)
    assert kind("pre_norm", before)
    assert not kind("post_norm", before)

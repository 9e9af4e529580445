"""Next tokens: a final state must predict its own sample; a model that cannot predict gives no verdict."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from headrace.errors import UsageError
from headrace_cli.verify import Kind, Ranks, verify
from headrace_cli.verify.books import Books
from headrace_cli.verify.head import Head
from headrace_cli.verify.problems import Findings
from headrace_cli.verify.semantic import NextTokens, at_most
from tests.support.datasets import HIDDEN, LENGTHS, Alter, Array, Recipe, States, build, compute_states
from tests.support.tiny_models import tiny_llama

RIGHT_PART = 0.45
EQUAL = (200, 200, 150, 200, 90, 200, 60, 200)


@pytest.fixture(scope="module")
def states(model: Path) -> States:
    return compute_states(model, EQUAL)


@pytest.fixture(scope="module")
def trained(model: Path, states: States) -> tuple[Array, ...]:
    """Final states before the norm that predict the next token in a part of the places, as a trained model's do."""
    weights = load_file(model / "model.safetensors")
    head, norm = weights["lm_head.weight"].numpy(), weights["model.norm.weight"].numpy()
    generator = np.random.default_rng(1)
    rows = []
    for token_ids in states.token_ids:
        due = np.array([*token_ids[1:], 0])
        guessed = np.where(generator.random(len(due)) < RIGHT_PART, due, generator.integers(0, 400, len(due)))
        rows.append((head[guessed] / norm * 8).astype(np.float32))
    return tuple(rows)


def finals(rows: Sequence[Array]) -> Alter:
    """Replace final states."""
    return lambda ordinal, aux, _: (aux, rows[ordinal])


def rank(folder: Path, model: Path) -> tuple[Ranks | None, Findings]:
    """Rank every row's next tokens, without recomputing."""
    findings = Findings()
    books = Books.open(folder, findings)
    next_tokens = NextTokens(Head(model, HIDDEN, books.final_state), books, findings)
    next_tokens.run(range(len(EQUAL)), lambda: None)
    result = next_tokens.finish(1.0)
    books.close()
    return result, findings


def found(findings: Findings) -> dict[int | None, Kind]:
    return {problem.ordinal: problem.kind for problem in findings.problems}


def test_states_that_predict_their_tokens_pass(
    model: Path, states: States, trained: tuple[Array, ...], tmp_path: Path
) -> None:
    ranks, findings = rank(build(tmp_path, model, states, Recipe(alter=finals(trained))), model)
    assert ranks is not None
    assert ranks.conclusive
    assert ranks.rate == pytest.approx(RIGHT_PART, abs=0.1)
    assert ranks.control < 0.02
    assert (ranks.rows, ranks.tokens) == (len(EQUAL), sum(EQUAL))
    assert not findings.problems
    assert not findings.notes


def test_two_rows_states_under_each_others_ids_are_named(
    model: Path, states: States, trained: tuple[Array, ...], tmp_path: Path
) -> None:
    rows = list(trained)
    rows[1], rows[3] = rows[3], rows[1]
    _, findings = rank(build(tmp_path, model, states, Recipe(alter=finals(rows))), model)
    assert found(findings) == {1: Kind.NEXT_TOKEN, 3: Kind.NEXT_TOKEN}
    assert findings.problems[0].detail.endswith("for the tokens of ordinal 3")
    assert findings.problems[1].detail.endswith("for the tokens of ordinal 1")


def test_states_of_a_text_that_is_not_here_are_seen(
    model: Path, states: States, trained: tuple[Array, ...], tmp_path: Path
) -> None:
    rows = list(trained)
    rows[2] = trained[3][: EQUAL[2]][::-1].copy()
    _, findings = rank(build(tmp_path, model, states, Recipe(alter=finals(rows))), model)
    assert found(findings) == {2: Kind.NEXT_TOKEN}
    assert findings.problems[0].detail.endswith("states of another text")


@pytest.mark.parametrize("shift", [1, -1])
def test_shifted_rows_are_named_even_if_all_are(
    model: Path, states: States, trained: tuple[Array, ...], tmp_path: Path, shift: int
) -> None:
    rows = [np.roll(row, shift, 0) for row in trained]
    _, findings = rank(build(tmp_path, model, states, Recipe(alter=finals(rows))), model)
    named = found(findings)
    assert set(named.values()) == {Kind.SHIFTED}
    # The shortest row alone may be too short to say so.
    assert len(named) >= len(EQUAL) - 1


def test_an_untrained_model_is_inconclusive_and_no_problem(model: Path, states: States, tmp_path: Path) -> None:
    folder = build(tmp_path, model, states)
    report = verify(folder, model=None, sample=8, all_rows=False, semantic=True, tolerance=None, progress=None)
    assert report.ok
    assert report.ranks is not None
    assert not report.ranks.conclusive
    (note,) = report.notes
    assert note.startswith("next tokens: inconclusive")


def test_few_hits_for_the_token_itself_are_no_shift_however_few_are_right(
    model: Path, states: States, tmp_path: Path
) -> None:
    weights = load_file(model / "model.safetensors")
    head, norm = weights["lm_head.weight"].numpy(), weights["model.norm.weight"].numpy()
    guesses = []
    for token_ids in states.token_ids:
        due = np.array([*token_ids[1:], 0])
        wrong = np.where(due == 7, 8, 7)
        few = np.arange(len(due)) % 12 == 0  # a frequent token would do the same
        guesses.append((head[np.where(few, np.array(token_ids), wrong)] / norm * 8).astype(np.float32))
    ranks, findings = rank(build(tmp_path, model, states, Recipe(alter=finals(guesses))), model)
    assert ranks is not None
    assert not ranks.conclusive
    assert found(findings) == {}


def test_an_untrained_tied_head_ranks_the_token_itself_and_that_is_no_shift(tmp_path: Path) -> None:
    model = tie(tiny_llama(tmp_path / "model", layers=8), 20.0)
    states = compute_states(model, EQUAL)
    _, findings = rank(build(tmp_path, model, states), model)
    first = Head(model, HIDDEN, "pre_norm").first(torch.from_numpy(states.pre_norm[0]))
    assert (first.numpy() == np.array(states.token_ids[0])).mean() > 0.3
    assert not findings.problems
    assert len(findings.notes) == 1


def test_rows_of_one_token_give_nothing_to_count(model: Path, tmp_path: Path) -> None:
    states = compute_states(model, (1,) * len(LENGTHS))
    ranks, findings = rank(build(tmp_path, model, states), model)
    assert ranks is None
    assert not findings.problems


def tie(model: Path, scale: float) -> Path:
    """Let a checkpoint use its embeddings, `scale` times as large, as its head."""
    weights = load_file(model / "model.safetensors")
    del weights["lm_head.weight"]
    weights["model.embed_tokens.weight"] *= scale
    save_file(weights, model / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": True}))
    return model


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("final_state", ["pre_norm", "post_norm"])
def test_the_head_ranks_as_the_model_does(tmp_path: Path, final_state: str, dtype: str, tied: bool) -> None:
    model = tiny_llama(tmp_path / "model", dtype=dtype)
    if tied:
        tie(model, 1.0)
    states = compute_states(model, (50, 1100))
    head = Head(model, HIDDEN, final_state)
    assert head.tied == tied
    network = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    for index, token_ids in enumerate(states.token_ids):
        final = (states.pre_norm if final_state == "pre_norm" else states.post_norm)[index]
        with torch.no_grad():
            expected = network(torch.tensor([token_ids])).logits[0].argmax(-1)
        assert (head.first(torch.from_numpy(final)) == expected).float().mean() > 0.995


def test_a_head_in_one_of_several_files_is_found(tmp_path: Path) -> None:
    model = tiny_llama(tmp_path / "model")
    weights = load_file(model / "model.safetensors")
    parts = {name: {key: value} for name, (key, value) in enumerate(weights.items())}
    (model / "model.safetensors").unlink()
    for name, part in parts.items():
        save_file(part, model / f"model-{name:05d}.safetensors")
    assert not Head(model, HIDDEN, "pre_norm").tied


@pytest.mark.parametrize(
    ("width", "config", "said"),
    [
        (2 * HIDDEN, {}, "no lm_head of width 128"),
        (HIDDEN, {"rms_norm_eps": None}, "no final RMSNorm"),
    ],
)
def test_a_head_that_cannot_be_used_is_named(tmp_path: Path, width: int, config: dict[str, object], said: str) -> None:
    model = tiny_llama(tmp_path / "model")
    table = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(table | config))
    with pytest.raises(UsageError, match=said):
        Head(model, width, "pre_norm")


def test_a_checkpoint_without_weights_is_named(tmp_path: Path) -> None:
    model = tiny_llama(tmp_path / "model")
    (model / "model.safetensors").write_bytes(b"torn")
    with pytest.raises(UsageError, match="the head cannot be read"):
        Head(model, HIDDEN, "pre_norm")


@pytest.mark.parametrize(("hits", "places", "rate"), [(0, 10, 0.5), (3, 10, 0.25), (10, 10, 0.9), (12, 400, 0.05)])
def test_the_binomial_bound_is_the_sum_of_its_terms(hits: int, places: int, rate: float) -> None:
    expected = sum(math.comb(places, k) * rate**k * (1 - rate) ** (places - k) for k in range(hits + 1))
    assert at_most(hits, places, rate) == pytest.approx(expected)

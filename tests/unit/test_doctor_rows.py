"""What the doctor sees in rows: states of another kind, of another request, of another place, and right ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from headrace.errors import UsageError, VerificationFailed
from headrace.runs import RunSpec
from headrace_cli.doctor.heads import next_tokens
from headrace_cli.doctor.prompts import Prompt
from headrace_cli.doctor.rows import kind_of_final, verified
from tests.support.datasets import LENGTHS, Array, Recipe, States, build, compute_states, make_spec, norm_of
from tests.support.tiny_models import tiny_llama


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="module")
def states(tiny: Path) -> States:
    return compute_states(tiny)


@pytest.fixture(scope="module")
def prompts(tiny: Path, states: States) -> list[Prompt]:
    """Every sample, and the token that transformers says comes next."""
    network = AutoModelForCausalLM.from_pretrained(tiny, dtype=torch.float32).eval()
    with torch.no_grad():
        return [
            Prompt(token_ids=ids, next_token=int(network(torch.tensor([ids])).logits[0, -1].argmax()))
            for ids in states.token_ids
        ]


def make(folder: Path, model: Path, states: States, recipe: Recipe) -> RunSpec:
    """A dataset by this recipe; its spec as a canary run's, all of whose samples are stored."""
    return replace(make_spec(build(folder, model, states, recipe), model, recipe), total=len(LENGTHS))


def all_by(finals: Sequence[Array]) -> Recipe:
    """A recipe whose rows have these final states, whatever kind they are said to be."""
    return Recipe(alter=lambda ordinal, aux, final: (aux, finals[ordinal]))


@pytest.mark.parametrize("dtype", ["F32", "BF16", "F16"])
@pytest.mark.parametrize("final_state", ["pre_norm", "post_norm"])
def test_right_states_are_of_their_kind_and_lead_to_the_servers_tokens(
    tmp_path: Path, tiny: Path, states: States, prompts: list[Prompt], dtype: str, final_state: str
) -> None:
    recipe = Recipe(dtype=dtype, final_state=final_state, norm=norm_of(tiny, dtype))
    spec = make(tmp_path, tiny, states, recipe)
    assert kind_of_final(spec).ok
    finding = next_tokens(spec, prompts, tiny)
    assert finding.ok, finding


@pytest.mark.parametrize("said", ["pre_norm", "post_norm"])
def test_a_final_state_of_the_other_kind_is_seen_without_the_model(
    tmp_path: Path, tiny: Path, states: States, said: str
) -> None:
    others = states.post_norm if said == "pre_norm" else states.pre_norm
    recipe = replace(all_by(others), final_state=said, norm=norm_of(tiny))
    finding = kind_of_final(make(tmp_path, tiny, states, recipe))
    assert finding.ok is False
    assert finding.error is VerificationFailed
    assert "HEADRACE_CAPTURE_FINAL_STATE" in finding.fix


def test_without_a_norm_the_kind_is_not_told_and_the_checkpoints_serves(
    tmp_path: Path, tiny: Path, states: States, prompts: list[Prompt]
) -> None:
    spec = make(tmp_path, tiny, states, Recipe())
    assert kind_of_final(spec).ok is None
    assert next_tokens(spec, prompts, tiny).ok


def test_the_final_states_of_another_request_are_seen(
    tmp_path: Path, tiny: Path, states: States, prompts: list[Prompt]
) -> None:
    # Ordinals 1 and 2 have one length, so that nothing but the values can tell them apart.
    finals = [states.pre_norm[{1: 2, 2: 1}.get(ordinal, ordinal)] for ordinal in range(len(LENGTHS))]
    finding = next_tokens(make(tmp_path, tiny, states, replace(all_by(finals), norm=norm_of(tiny))), prompts, tiny)
    assert finding.ok is False
    assert "of another request" in finding.fix


def test_the_residual_stream_of_another_layer_is_seen(
    tmp_path: Path, tiny: Path, states: States, prompts: list[Prompt]
) -> None:
    finals = [aux[:, -1] for aux in states.aux]
    finding = next_tokens(make(tmp_path, tiny, states, replace(all_by(finals), norm=norm_of(tiny))), prompts, tiny)
    assert finding.ok is False


def test_a_checkpoint_without_its_weights_is_said_to_be_none(
    tmp_path: Path, tiny: Path, states: States, prompts: list[Prompt]
) -> None:
    spec = make(tmp_path, tiny, states, Recipe(norm=norm_of(tiny)))
    empty = tmp_path / "empty"
    empty.mkdir()
    (empty / "config.json").write_bytes((tiny / "config.json").read_bytes())
    with pytest.raises(UsageError, match="head cannot be read"):
        next_tokens(spec, prompts, empty)


def test_rows_are_verified_and_recomputed_unless_there_is_a_reason_not_to(
    tmp_path: Path, tiny: Path, states: States
) -> None:
    right = make(tmp_path / "right", tiny, states, Recipe(norm=norm_of(tiny)))
    rows, recomputed = verified(right, "")
    assert rows.ok
    assert recomputed.ok
    assert "recomputed in float32" in recomputed.what
    rows, recomputed = verified(right, "it is too large")
    assert rows.ok
    assert recomputed.ok is None
    assert "it is too large" in recomputed.fix
    swapped = Recipe(norm=norm_of(tiny), alter=lambda ordinal, aux, final: (aux[:, ::-1], final))
    (finding,) = verified(make(tmp_path / "wrong", tiny, states, swapped), "")
    assert finding.ok is False
    assert finding.error is VerificationFailed

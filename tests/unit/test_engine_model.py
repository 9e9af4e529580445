"""The engine's model: boundaries, states of chunks, and what it refuses."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel, Qwen3Config, Qwen3ForCausalLM

from headrace.errors import UsageError
from headrace_engine.model import TargetModel, read_boundaries
from tests.support.engine import random_ids
from tests.support.tiny_models import tiny_llama


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("model"), layers=7)


@pytest.mark.parametrize(
    ("wanted", "layers", "expected"),
    [("eagle3", 30, (2, 15, 27)), ("eagle3", 8, (2, 4, 5)), ("2, 15,27", 30, (2, 15, 27)), ("0,8", 8, (0, 8))],
)
def test_boundaries_resolve(wanted: str, layers: int, expected: tuple[int, ...]) -> None:
    assert read_boundaries(wanted, layers) == expected


@pytest.mark.parametrize(
    ("wanted", "layers"), [("", 8), ("2,x", 8), ("3,3", 8), ("5,2", 8), ("-1,2", 8), ("2,9", 8), ("eagle3", 6)]
)
def test_boundaries_that_do_not_exist_are_refused(wanted: str, layers: int) -> None:
    with pytest.raises(UsageError, match="boundaries"):
        read_boundaries(wanted, layers)


@pytest.mark.parametrize("final_state", ["pre_norm", "post_norm"])
def test_chunks_give_the_states_of_one_plain_forward(folder: Path, final_state: str) -> None:
    model = TargetModel(folder, boundaries="0,3,7", final_state=final_state, dtype="float32")
    plain = AutoModelForCausalLM.from_pretrained(folder)
    ids = random_ids(50, seed=1)
    cache = model.new_cache()
    parts = [model.forward(ids[a:b], cache, want_token=b == 50) for a, b in ((0, 1), (1, 33), (33, 50))]
    with torch.inference_mode():
        expected = plain(input_ids=torch.tensor([ids]), output_hidden_states=True)
        first, third, seventh, final = (torch.cat(states) for states in zip(*map(_tensors, parts), strict=True))
        torch.testing.assert_close(first, expected.hidden_states[0][0])
        torch.testing.assert_close(third, expected.hidden_states[3][0], rtol=0, atol=1e-4)
        normed = plain.model.norm(seventh)
        torch.testing.assert_close(normed, expected.hidden_states[-1][0], rtol=0, atol=1e-4)
        torch.testing.assert_close(final, seventh if final_state == "pre_norm" else normed, rtol=0, atol=1e-6)
    assert [part.next_token for part in parts] == [None, None, int(expected.logits[0, -1].argmax())]


def _tensors(part: object) -> tuple[torch.Tensor, ...]:
    return (*part.boundaries, part.final)  # type: ignore[attr-defined]


def test_the_final_norm_is_told_as_weight_and_eps(folder: Path) -> None:
    model = TargetModel(folder, boundaries="eagle3", final_state="pre_norm", dtype="bfloat16")
    assert model.norm_weight is not None
    assert (tuple(model.norm_weight.shape), model.norm_weight.dtype, model.norm_eps) == ((64,), torch.bfloat16, 1e-5)


def test_a_qwen_model_is_captured_too(tmp_path: Path) -> None:
    config = Qwen3Config(
        vocab_size=300, hidden_size=32, intermediate_size=64, num_hidden_layers=7, num_attention_heads=2,
        num_key_value_heads=1, head_dim=16,
    )  # fmt: skip
    Qwen3ForCausalLM(config).save_pretrained(tmp_path)
    model = TargetModel(tmp_path, boundaries="eagle3", final_state="pre_norm", dtype="float32")
    captured = model.forward([1, 2, 3], model.new_cache(), want_token=True)
    assert [tuple(states.shape) for states in (*captured.boundaries, captured.final)] == [(3, 32)] * 4
    assert model.norm_weight is not None


def test_another_kind_of_model_is_refused(tmp_path: Path) -> None:
    GPT2LMHeadModel(GPT2Config(vocab_size=100, n_embd=16, n_layer=7, n_head=2)).save_pretrained(tmp_path)
    with pytest.raises(UsageError, match="serve it with SGLang"):
        TargetModel(tmp_path, boundaries="eagle3", final_state="pre_norm", dtype="float32")


def test_a_folder_without_weights_is_refused(tmp_path: Path, folder: Path) -> None:
    (tmp_path / "config.json").write_bytes((folder / "config.json").read_bytes())
    with pytest.raises(UsageError, match="cannot be loaded"):
        TargetModel(tmp_path, boundaries="eagle3", final_state="pre_norm", dtype="float32")


def test_a_checkpoint_that_lacks_a_layer_is_refused_not_made_up(tmp_path: Path, folder: Path) -> None:
    copied = shutil.copytree(folder, tmp_path / "model")
    table = json.loads((copied / "config.json").read_text())
    table.pop("layer_types", None)
    (copied / "config.json").write_text(json.dumps(table | {"num_hidden_layers": table["num_hidden_layers"] + 1}))
    with pytest.raises(UsageError, match="lacks weights"):
        TargetModel(copied, boundaries="eagle3", final_state="pre_norm", dtype="float32")

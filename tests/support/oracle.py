"""An oracle that knows nothing of headrace: transformers computes the states, safetensors reads the rows."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM

TOLERANCE = 1e-4  # absolute and relative, in float32: chunks and whole prompts add up in another order


def assert_rows_are_the_models(output: Path, data: Path, model: Path, boundaries: tuple[int, ...]) -> None:
    """Every line of `data` (ready ids and masks) has its one row, with the states of a plain forward (pre-norm)."""
    network = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    caught: list[torch.Tensor] = []
    hook = network.model.norm.register_forward_pre_hook(lambda _, args: caught.append(args[0][0]))
    samples = [json.loads(line) for line in data.read_text().splitlines()]
    rows = sorted((output / "rows").rglob("*.safetensors"))
    assert [int(row.stem) for row in rows] == list(range(len(samples)))
    for sample, row in zip(samples, rows, strict=True):
        caught.clear()
        ids = torch.tensor([sample["input_ids"]])
        with torch.inference_mode():
            states = network(ids, output_hidden_states=True, use_cache=False).hidden_states
        expected = {"aux": torch.cat([states[boundary][0] for boundary in boundaries], dim=1), "final": caught[0]}
        with safe_open(row, framework="pt") as file:
            assert file.get_tensor("token_ids").tolist() == sample["input_ids"], row
            assert file.get_tensor("loss_mask").tolist() == sample["loss_mask"], row
            for name, wanted in expected.items():
                found = file.get_tensor(name)
                assert found.shape == wanted.shape, (row, name)
                excess = (found - wanted).abs() - TOLERANCE * (1 + wanted.abs())
                assert excess.max() <= 0, (row, name)
    hook.remove()

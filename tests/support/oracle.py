"""An oracle that knows nothing of headrace: transformers computes the states, safetensors reads the rows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor
from transformers import AutoModelForCausalLM

TOLERANCE = 1e-4  # absolute and relative, in float32: chunks and whole prompts add up in another order


class Oracle:
    """The states of whole prompts, by one plain forward each: `aux` [N, k*D] and `final` [N, D], pre-norm."""

    def __init__(self, model: Path, boundaries: tuple[int, ...]) -> None:
        network: Any = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
        self._network = network.eval()
        self._boundaries = boundaries
        self.layers: int = self._network.config.num_hidden_layers
        self._final = torch.empty(0)
        self._network.model.norm.register_forward_pre_hook(self._catch)

    def states(self, token_ids: list[int]) -> dict[str, Tensor]:
        *states, final = self.everything(token_ids)
        return {"aux": torch.cat([states[boundary] for boundary in self._boundaries], dim=1), "final": final}

    @torch.inference_mode()
    def everything(self, token_ids: list[int]) -> list[Tensor]:
        """The states [N, D] at every boundary, b from 0 to L."""
        states = self._network(torch.tensor([token_ids]), output_hidden_states=True, use_cache=False).hidden_states
        return [*(state[0] for state in states[:-1]), self._final]  # the last one that it gives is normed

    @torch.inference_mode()
    def normed(self, states: Tensor) -> Tensor:
        """What the final norm makes of states [N, D]."""
        normed: Tensor = self._network.model.norm(states)
        return normed

    def _catch(self, _norm: object, args: tuple[Tensor, ...]) -> None:
        self._final = args[0][0]


def agree(found: Tensor, wanted: Tensor) -> bool:
    """Whether two states have one shape and are equal within the tolerance."""
    if found.shape != wanted.shape:
        return False
    return bool(((found - wanted).abs() <= TOLERANCE * (1 + wanted.abs())).all())


def assert_rows_are_the_models(output: Path, data: Path, model: Path, boundaries: tuple[int, ...]) -> None:
    """Every line of `data` (ready ids and masks) has its one row, with the states of a plain forward (pre-norm)."""
    oracle = Oracle(model, boundaries)
    samples = [json.loads(line) for line in data.read_text().splitlines()]
    rows = sorted((output / "rows").rglob("*.safetensors"))
    assert [int(row.stem) for row in rows] == list(range(len(samples)))
    for sample, row in zip(samples, rows, strict=True):
        with safe_open(row, framework="pt") as file:
            assert file.get_tensor("token_ids").tolist() == sample["input_ids"], row
            assert file.get_tensor("loss_mask").tolist() == sample["loss_mask"], row
            for name, wanted in oracle.states(sample["input_ids"]).items():
                assert agree(file.get_tensor(name), wanted), (row, name)

"""The target model on the CPU: one chunk of one request forward, with the residual stream at the boundaries."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, Cache, DynamicCache

from headrace.boundaries import EAGLE3, resolve_boundaries
from headrace.dumps import PRE_NORM
from headrace.errors import UsageError

_FINAL = -1  # no boundary: the final state's place among what was seen


@dataclass(frozen=True, slots=True, kw_only=True)
class Captured:
    """What one forward gave: `boundaries`, each [T, D], low to high, and `final` [T, D], in the model's dtype.

    `next_token` is the greedy continuation of the last row, or None where it was not asked for.
    """

    boundaries: tuple[Tensor, ...]
    final: Tensor
    next_token: int | None


def quiet() -> None:
    """Keep transformers' progress bars out of the log."""
    transformers.utils.logging.disable_progress_bar()  # type: ignore[no-untyped-call]


def read_boundaries(wanted: str, layers: int) -> tuple[int, ...]:
    """Read `eagle3` or a list such as `2,15,27`, as an option has it, for a model of `layers` decoder layers.

    Raises:
        UsageError: not numbers, or not what `resolve_boundaries` takes.
    """
    if wanted == EAGLE3:
        return resolve_boundaries(wanted, layers)
    try:
        numbers = [int(part) for part in wanted.split(",")]
    except ValueError:
        raise UsageError(f"boundaries {wanted!r}: write {EAGLE3}, or numbers such as 2,15,27") from None
    return resolve_boundaries(numbers, layers)


class TargetModel:
    """A causal language model of the Llama and Qwen kind, which tells the states it computes.

    Raises:
        UsageError: the folder holds no such model, or the boundaries do not exist in it.
    """

    def __init__(self, folder: Path, *, boundaries: str, final_state: str, dtype: str) -> None:
        """Load a checkpoint's weights in `dtype` (float32, bfloat16 or float16); no code of it is run."""
        try:
            config = AutoConfig.from_pretrained(folder, local_files_only=True)
            # Checked before the weights are read, which takes the longest.
            self.boundaries = read_boundaries(boundaries, int(config.num_hidden_layers))
            answer: Any = AutoModelForCausalLM.from_pretrained(
                folder, config=config, dtype=getattr(torch, dtype), local_files_only=True, output_loading_info=True
            )
            model, loaded = answer
        except (OSError, ValueError, KeyError, AttributeError, RuntimeError, SafetensorError) as error:
            raise UsageError(f"the model in {folder} cannot be loaded: {_first_line(error)}") from error
        if loaded["missing_keys"]:  # transformers would have made them up
            some = ", ".join(sorted(loaded["missing_keys"])[:3])
            raise UsageError(f"the model in {folder} lacks weights: {some}; is the checkpoint whole?")
        self._model = model.eval()
        self._decoder, self._norm = _parts(model)
        self.config = config
        self.layers = int(config.num_hidden_layers)
        self.hidden_size = int(config.hidden_size)
        self.vocab_size = int(config.vocab_size)
        self.context_length = int(config.max_position_embeddings)
        self.dtype: torch.dtype = model.dtype
        self.final_state = final_state
        self.stop_tokens = _token_ids(model.generation_config.eos_token_id)
        self.norm_weight, self.norm_eps = _rms_norm(self._norm, self.hidden_size)
        self._seen: dict[int, Tensor] = {}
        self._watch()

    def new_cache(self) -> Cache:
        """Make the empty keys and values of one request."""
        return DynamicCache(config=self.config)

    @torch.inference_mode()
    def forward(self, token_ids: Sequence[int], cache: Cache, *, want_token: bool) -> Captured:
        """Run T tokens of one request on top of `cache`, which grows by T."""
        self._seen = {}
        output = self._decoder(input_ids=torch.tensor([token_ids]), past_key_values=cache, use_cache=True)
        next_token = None
        if want_token:  # the logits of one row: the head is a fifth of a small model's work
            logits = self._model.get_output_embeddings()(output.last_hidden_state[:, -1])
            next_token = int(logits.argmax())
        return Captured(
            boundaries=tuple(self._seen[boundary] for boundary in self.boundaries),
            final=self._seen[_FINAL],
            next_token=next_token,
        )

    def _watch(self) -> None:
        """Hook the layers that the boundaries enter, and the final norm."""

        def entering(boundary: int) -> Any:
            def hook(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
                self._seen[boundary] = _rows(args, kwargs)

            return hook

        def final(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor) -> None:
            self._seen[_FINAL] = _rows(args, kwargs) if self.final_state == PRE_NORM else output[0]

        for boundary in self.boundaries:
            module = self._norm if boundary == self.layers else self._decoder.layers[boundary]
            module.register_forward_pre_hook(entering(boundary), with_kwargs=True)
        self._norm.register_forward_hook(final, with_kwargs=True)


def _rows(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    states: Tensor = args[0] if args else kwargs["hidden_states"]
    return states[0]


def _parts(model: Any) -> tuple[Any, nn.Module]:
    decoder = model.get_decoder()
    norm = getattr(decoder, "norm", None)
    if not isinstance(getattr(decoder, "layers", None), nn.ModuleList) or not isinstance(norm, nn.Module):
        raise UsageError(
            f"{type(model).__name__} has no `layers` and final `norm` where Llama and Qwen models have them; "
            "serve it with SGLang"
        )
    return decoder, norm


def _rms_norm(norm: nn.Module, hidden_size: int) -> tuple[Tensor | None, float]:
    """Give the final norm's weight [D] and eps if it computes x * weight / sqrt(mean(x**2) + eps), else None, 0.0.

    Others look alike (Gemma's adds 1 to the weight), so it is tried, not looked up.
    """
    weight = getattr(norm, "weight", None)
    eps = getattr(norm, "variance_epsilon", getattr(norm, "eps", None))
    if not isinstance(weight, Tensor) or not isinstance(eps, float):
        return None, 0.0
    with torch.inference_mode():
        row = torch.linspace(-2, 3, hidden_size, dtype=weight.dtype)
        wide = row.float()
        expected = weight.float() * wide * torch.rsqrt(wide.pow(2).mean() + eps)
        same = torch.allclose(norm(row[None, None])[0, 0].float(), expected, rtol=0.02, atol=0.02)
    return (weight.detach(), eps) if same else (None, 0.0)


def _token_ids(value: Any) -> frozenset[int]:
    return frozenset(value if isinstance(value, list) else [] if value is None else [value])


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0] or type(error).__name__

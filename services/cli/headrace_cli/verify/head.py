"""A model's head without the model: the final norm and lm_head, read straight from a checkpoint's files."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from headrace.dumps import PRE_NORM
from headrace.errors import UsageError
from headrace.finalnorm import FinalNorm

# Tokens and rows of the head that are multiplied at once: logits of 32 MiB.
_TOKENS, _VOCABULARY = 1024, 8192
_NORM = re.compile(r"(^|.*\.)(model|language_model)\.norm\.weight")
_HEAD = re.compile(r"(^|.*\.)lm_head\.weight")
_EMBEDDING = re.compile(r"(^|.*\.)embed_tokens\.weight")
_NO_NORM = "no final RMSNorm weight and rms_norm_eps as Llama and Qwen models have them"
_DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}
# Their norms multiply by 1 + weight.
_ONE_PLUS = ("gemma", "recurrent_gemma", "vaultgemma", "qwen3_next", "qwen3_5")


class Head:
    """Ranks tokens from final states: lm_head(RMSNorm(x)) for states before the norm, lm_head(x) for those after."""

    def __init__(self, folder: Path, hidden_size: int, final_state: str) -> None:
        """Read the head of a checkpoint, for rows that hold this final state.

        Raises:
            UsageError: it is not there, of another width than the rows', or behind a norm that is not RMSNorm.
        """
        try:
            config = _config(folder)
            self.tied = False
            head = _find(folder, _HEAD)
            if head is None:
                head, self.tied = _find(folder, _EMBEDDING), True
            norm = _find(folder, _NORM) if final_state == PRE_NORM else None
        except (OSError, ValueError, AttributeError, SafetensorError) as error:
            raise _unusable(folder, f"{type(error).__name__}: {error}") from error
        if head is None or head.shape[1:] != (hidden_size,):
            raise _unusable(folder, f"no lm_head of width {hidden_size} in its safetensors files")
        self._head = head
        self._norm: tuple[Tensor, float] | None = None
        if final_state == PRE_NORM:
            self._norm = _rms_norm(config, norm, hidden_size)
            if self._norm is None:
                raise _unusable(folder, _NO_NORM)

    @torch.inference_mode()
    def first(self, final: Tensor) -> Tensor:
        """The token that ranks first from each of the states [N, D] in float32: int64 [N]."""
        return torch.cat([self._first(final[start : start + _TOKENS]) for start in range(0, len(final), _TOKENS)])

    @torch.inference_mode()
    def logits(self, final: Tensor) -> Tensor:
        """The logits [N, V] of a few states [N, D], both in float32."""
        normed = self._normed(final)
        parts = (self._head[start : start + _VOCABULARY] for start in range(0, len(self._head), _VOCABULARY))
        return torch.cat([normed @ part.float().T for part in parts], dim=-1)

    def _normed(self, final: Tensor) -> Tensor:
        if self._norm is None:
            return final
        weight, eps = self._norm
        return final * torch.rsqrt(final.square().mean(-1, keepdim=True) + eps) * weight

    def _first(self, final: Tensor) -> Tensor:
        final = self._normed(final)
        best = torch.full((len(final),), -torch.inf)
        token = torch.zeros(len(final), dtype=torch.int64)
        for start in range(0, len(self._head), _VOCABULARY):
            logits = final @ self._head[start : start + _VOCABULARY].float().T
            value, index = logits.max(dim=-1)
            better = value > best
            best = torch.where(better, value, best)
            token = torch.where(better, index + start, token)
        return token


@torch.inference_mode()
def norm_difference(norm: FinalNorm, folder: Path) -> str | None:
    """What differs between a final norm and that of a checkpoint in the same dtype; None if nothing does.

    Raises:
        UsageError: the checkpoint's is not there, of another width, or no RMSNorm.
    """
    try:
        found = _rms_norm(_config(folder), _find(folder, _NORM), norm.hidden_size)
    except (OSError, ValueError, AttributeError, SafetensorError) as error:
        raise UsageError(f"{folder}: {type(error).__name__}: {error}") from error
    if found is None:
        raise UsageError(f"{folder}: {_NO_NORM}")
    weight, eps = found
    kept = torch.frombuffer(bytearray(norm.weight), dtype=_DTYPES[norm.dtype])
    # As an engine that serves the model in this dtype rounds it.
    differing = int((weight.to(kept.dtype) != kept).sum())
    if not differing and norm.eps == eps:
        return None
    return f"{differing} of {norm.hidden_size} weights differ, eps is {norm.eps}, there {eps}"


def _config(folder: Path) -> dict[str, Any]:
    config = json.loads((folder / "config.json").read_bytes())
    text: dict[str, Any] = config.get("text_config", config)
    return text


def _find(folder: Path, name: re.Pattern[str]) -> Tensor | None:
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            for key in file.keys():  # noqa: SIM118 - no mapping
                if name.fullmatch(key):
                    tensor: Tensor = file.get_tensor(key)
                    return tensor
    return None


def _rms_norm(config: dict[str, Any], weight: Tensor | None, hidden_size: int) -> tuple[Tensor, float] | None:
    eps = config.get("rms_norm_eps")
    if weight is None or weight.shape != (hidden_size,) or not isinstance(eps, float):
        return None
    if str(config.get("model_type")).startswith(_ONE_PLUS):
        return 1 + weight.float(), eps
    return weight.float(), eps


def _unusable(folder: Path, problem: str) -> UsageError:
    return UsageError(f"{folder}: the head cannot be read: {problem}; give another --model, or --no-semantic")

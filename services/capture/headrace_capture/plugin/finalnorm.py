"""The norm behind a served model's last layer: what it is made of, and a tap on its input."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from headrace_capture.plugin.boundaries import capture_owner

_EPSILONS = ("variance_epsilon", "eps")


@dataclass(frozen=True, slots=True, kw_only=True)
class FinalNormModule:
    """A model's last norm: `weight` [D] and `eps` where it is a plain RMSNorm, else None and 0."""

    module: torch.nn.Module
    weight: torch.Tensor | None
    eps: float


def find_final_norm(model: Any) -> FinalNormModule | None:
    """The `norm` of the module that runs the decoder layers; None when it is not there."""
    norm = getattr(capture_owner(model), "norm", None)
    if not isinstance(norm, torch.nn.Module):
        return None
    weight = getattr(norm, "weight", None)
    eps = next((float(getattr(norm, name)) for name in _EPSILONS if hasattr(norm, name)), None)
    if type(norm).__name__ != "RMSNorm" or not isinstance(weight, torch.Tensor) or eps is None:
        return FinalNormModule(module=norm, weight=None, eps=0.0)  # such as Gemma's, which adds one to its weight
    return FinalNormModule(module=norm, weight=weight, eps=eps)


class PreNormTap:
    """Keeps the input of a norm, of each forward while `wanted` says so.

    The norm adds the residual itself where there is one, and hands the sum out as its second output; without one its
    argument is the sum.
    """

    def __init__(self, module: torch.nn.Module, wanted: Callable[[], bool]) -> None:
        self._wanted = wanted
        self._kept: Any = None
        module.register_forward_hook(self._ran)

    def clear(self) -> None:
        """A forward begins."""
        self._kept = None

    def take(self) -> torch.Tensor | None:
        """The input [T, D], once; None when the norm was not called since `clear`."""
        kept, self._kept = self._kept, None
        return kept if isinstance(kept, torch.Tensor) else None

    def _ran(self, module: torch.nn.Module, arguments: tuple[Any, ...], output: Any) -> None:
        # Nothing here may raise: it is in the middle of the model's forward.
        if self._wanted():
            second = output[1] if isinstance(output, tuple) and len(output) > 1 else None
            self._kept = second if second is not None else arguments[0] if arguments else None


class DeclaredNorm:
    """The final norm's weight as it was declared, to tell whether the model still has it after its weights changed."""

    def __init__(self, norm: FinalNormModule) -> None:
        self._module = norm.module
        self._declared = None if norm.weight is None else norm.weight.detach().clone()

    def holds(self) -> bool:
        """Whether it is the same, or none was declared; on a GPU this waits for the device."""
        weight = getattr(self._module, "weight", None)
        return self._declared is None or (isinstance(weight, torch.Tensor) and torch.equal(weight, self._declared))

"""Where a forward's states come from: SGLang's own auxiliary output, or what its logits processor was given."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class States:
    """A forward's states: `boundaries` are k tensors [T, D] or a packed one [T, k*D], `post_norm` is [T, D]."""

    boundaries: tuple[torch.Tensor, ...]
    post_norm: torch.Tensor


class StateSource(Protocol):
    """An adapter to one way in which SGLang hands states out."""

    name: str

    def clear(self) -> None:
        """A forward begins: what the last one left must not be taken for its own."""

    def keep(self, hidden_states: Any, aux_hidden_states: Any, before_norm: Any) -> None:
        """The logits processor was called with these; only references may be kept, since it is for each forward."""

    def take(self, output: Any) -> States | None:
        """The states of the forward that ended with this logits output, once; None when there are none."""


class AuxiliaryOutput:
    """SGLang's own, of `--enable-return-aux-hidden-states`: two fields of the logits output."""

    name = "auxiliary output"

    def __init__(self) -> None:
        self._replaced = False

    def clear(self) -> None:
        """Nothing replaces the auxiliary states."""
        self._replaced = False

    def keep(self, hidden_states: Any, aux_hidden_states: Any, before_norm: Any) -> None:
        """A model that hands the final norm's input to the logits processor gets that back in their field."""
        self._replaced = before_norm is not None

    def take(self, output: Any) -> States | None:
        """The output's fields."""
        if self._replaced:
            return None
        return _states(getattr(output, "last_hidden_states", None), getattr(output, "hidden_states", None))


class LogitsInput:
    """What `LogitsProcessor.forward` is given, of all tokens of a forward."""

    name = "logits processor"

    def __init__(self) -> None:
        self._kept: tuple[Any, Any] | None = None

    def clear(self) -> None:
        """Forget the last forward's."""
        self._kept = None

    def keep(self, hidden_states: Any, aux_hidden_states: Any, before_norm: Any) -> None:
        """Both are what is wanted."""
        self._kept = hidden_states, aux_hidden_states

    def take(self, output: Any) -> States | None:
        """What was kept."""
        kept, self._kept = self._kept, None
        return None if kept is None else _states(*kept)


def _states(final: Any, aux: Any) -> States | None:
    if not isinstance(final, torch.Tensor) or aux is None:
        return None
    return States(boundaries=(aux,) if isinstance(aux, torch.Tensor) else tuple(aux), post_norm=final)

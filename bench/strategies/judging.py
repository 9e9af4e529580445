"""Compares what a trial stored with a plain forward of each prompt."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors.torch import load_file
from torch import Tensor

from bench.strategies.trials import BOUNDARIES, Trial
from tests.support.oracle import Oracle, agree


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """A trial's rows, counted: `right`, `wrong` and `lost` add up to `samples`.

    `silent` of the wrong ones have as many rows as their prompt has tokens, so that no check of shapes finds them.
    """

    trial: Trial
    samples: int
    right: int
    silent: int
    lost: int

    @property
    def wrong(self) -> int:
        """Samples whose states are not those of their tokens."""
        return self.samples - self.right - self.lost

    def as_dict(self) -> dict[str, Any]:
        """Everything but the rows, for JSON."""
        trial, conditions = self.trial, self.trial.conditions
        return {
            "pairing": trial.pairing,
            "conditions": conditions.name,
            **{name: getattr(conditions, name) for name in ("concurrency", "prefix_cache", "step", "shared")},
            **{name: getattr(self, name) for name in ("samples", "right", "wrong", "silent", "lost")},
            **{name: getattr(trial, name) for name in ("seconds", "probes", "chats", "short", "refused", "again")},
        }


class Judge:
    """Holds the states of all prompts, (k + 1)·D·4 bytes a token."""

    def __init__(self, prompts: Sequence[Sequence[int]], model: Path) -> None:
        oracle = Oracle(model, BOUNDARIES)
        self._expected = [oracle.states(list(prompt)) for prompt in prompts]

    def score(self, trial: Trial) -> Score:
        """Count the rows of a trial."""
        right = silent = lost = 0
        for wanted, row in zip(self._expected, trial.rows, strict=True):
            if row is None:
                lost += 1
                continue
            found = load_file(row)
            if all(agree(found[name], states) for name, states in wanted.items()):
                right += 1
            elif _shapes(found, wanted):
                silent += 1
        return Score(trial=trial, samples=len(self._expected), right=right, silent=silent, lost=lost)


def _shapes(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> bool:
    return all(found[name].shape == states.shape for name, states in wanted.items())

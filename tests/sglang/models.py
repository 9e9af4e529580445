"""The models that the servers of this tier serve: SmolLM2, and tiny random ones of several families."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from headrace_engine.checkpoint import smollm2_checkpoint
from tests.support.tiny_models import tiny_llama, tiny_qwen3, tiny_qwen3_moe

LAYERS, HIDDEN = 8, 128


class Checkpoints:
    """Checkpoints by name, each made once."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._made: dict[str, Path] = {}

    def get(self, name: str) -> Path:
        """The folder of the checkpoint that `MODELS` names so."""
        if name not in self._made:
            self._made[name] = MODELS[name](self._folder / name)
        return self._made[name]


def _smollm2(_folder: Path) -> Path:
    return smollm2_checkpoint()


def _llama(folder: Path) -> Path:
    return tiny_llama(folder, layers=LAYERS, hidden=HIDDEN)


def _qwen3(folder: Path) -> Path:
    return tiny_qwen3(folder, layers=LAYERS, hidden=HIDDEN)


def _qwen3_moe(folder: Path) -> Path:
    return tiny_qwen3_moe(folder, layers=LAYERS, hidden=HIDDEN)


MODELS: Mapping[str, Callable[[Path], Path]] = {
    "smollm2": _smollm2,
    "llama": _llama,
    "qwen3": _qwen3,
    "qwen3_moe": _qwen3_moe,
}

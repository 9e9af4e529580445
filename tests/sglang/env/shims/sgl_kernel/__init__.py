"""Stands for SGLang's kernels, which are made for GPUs: every name can be imported, and none can be called."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn


def __getattr__(name: str) -> Callable[..., NoReturn]:
    if name.startswith("__"):  # asked for by the import system, which must see what is not there
        raise AttributeError(name)

    def absent(*_args: Any, **_kwargs: Any) -> NoReturn:
        raise NotImplementedError(f"sgl_kernel.{name} runs on GPUs only; choose a CPU backend for what called it")

    absent.__name__ = name
    return absent

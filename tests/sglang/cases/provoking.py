"""A plugin beside headrace's own, for tests: it notes each forward, and does what files in its folder ask for.

It runs inside SGLang's processes, so it imports nothing of the tests. Its folder lies beside the dump folder; without
that it does nothing. `PROVOKE_HIDE` names an attribute, by its dotted path, that headrace shall not find, while
SGLang's own calls still reach it.
"""

from __future__ import annotations

import json
import os
import pkgutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

NAME = "provoking"
HIDE = "PROVOKE_HIDE"
FORWARDS = "forwards.jsonl"
# Requests, as files in the folder; what `BROKEN_WRITERS` holds names the exception.
RETRACT, BROKEN_WRITERS = "retract", "broken-writers"

_ERRORS: dict[str, type[BaseException]] = {
    "RuntimeError": RuntimeError,
    "MemoryError": MemoryError,
    "SystemExit": SystemExit,
}


def register() -> None:
    """SGLang's entry point."""
    dumps = os.environ.get("HEADRACE_DUMP_DIR")
    if not dumps:
        return
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    folder = Path(dumps).with_name(NAME)
    folder.mkdir(exist_ok=True)
    note = _Note(folder)
    HookRegistry.register("sglang.srt.model_executor.model_runner.ModelRunner.forward", note, HookType.AFTER)
    for name in ("pwrite", "pwritev", "posix_fallocate"):
        setattr(os, name, _breakable(getattr(os, name), folder / BROKEN_WRITERS))
    if hidden := os.environ.get(HIDE):
        _hide(hidden)


class _Note:
    """After each forward of rank 0: one line about it, and SGLang's own switch for retraction as the file has it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def __call__(self, result: Any, runner: Any, batch: Any, *_args: Any, **_more: Any) -> None:
        from sglang.srt.managers import scheduler
        from sglang.srt.runtime_context import get_parallel

        scheduler.TEST_RETRACT = (self._folder / RETRACT).exists()
        if get_parallel().tp_rank:
            return
        line = {
            "mode": batch.forward_mode.name,
            "rids": list(batch.rids or ()),
            "rows": [int(rows) for rows in batch.extend_seq_lens_cpu or ()],
            "prefixes": [int(rows) for rows in batch.extend_prefix_lens_cpu or ()],
        }
        with (self._folder / FORWARDS).open("a") as file:
            file.write(json.dumps(line) + "\n")


def _breakable(function: Callable[..., Any], switch: Path) -> Callable[..., Any]:
    """The function, which raises in the capture's threads while the file is there."""

    def broken(*args: Any, **more: Any) -> Any:
        if threading.current_thread().name.startswith("headrace-capture") and switch.exists():
            raise _ERRORS[switch.read_text()]("provoked")
        return function(*args, **more)

    return broken


def _hide(path: str) -> None:
    """Take an attribute from its class: a look at the class finds nothing, a call by an instance still does."""
    owner_path, name = path.rsplit(".", 1)
    owner = pkgutil.resolve_name(owner_path)
    original = owner.__dict__[name]
    delattr(owner, name)

    def fallback(self: Any, wanted: str) -> Any:
        if wanted == name:
            return original.__get__(self)
        raise AttributeError(wanted)

    owner.__getattr__ = fallback

"""The folders that a doctor is pointed at: a checkpoint, and a place for the canaries' rows."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from headrace.errors import Conflict, UsageError
from headrace_cli.console import human_bytes
from headrace_cli.submit import resolve_model

SHARED = "give --output a folder that the dispatchers and the site's writers reach under that path, and may write to"
# A forward in float32 on this machine's processor: beyond these it is no quick look any more.
_MOST_WEIGHTS = 4 << 30  # bytes
_MOST_WORK = 2e13  # bytes of weights times tokens


def given_checkpoint(model: str) -> Path | None:
    """The folder that --model names; None where it names none.

    Raises:
        UsageError: it is no checkpoint's, or cannot be looked into.
    """
    if not model:
        return None
    folder = absolute(resolve_model(model) or Path(model))
    if problem := _no_checkpoint(folder):
        raise UsageError(f"{folder} is no checkpoint folder: {problem}; give another --model")
    return folder


def served_checkpoint(info: Mapping[str, Any], given: Path | None) -> tuple[Path | None, str]:
    """The served checkpoint's folder, by what the engine says of itself if none is given; or why there is none here."""
    if given is not None:
        return given, ""
    named = Path(str(info.get("model_path", "")))
    problem = _no_checkpoint(named) if named.is_absolute() else ""
    if named.is_absolute() and not problem:
        return named, ""
    why = f" ({problem})" if problem else ""
    return None, f"{str(named)[:200]} is no checkpoint folder here{why}: give it with --model"


def too_large(checkpoint: Path, tokens: int) -> str:
    """Why no forward over so many tokens is repeated here; empty where it is."""
    try:
        weights = sum(path.stat().st_size for path in checkpoint.glob("*.safetensors"))
    except OSError as error:
        return f"{error.filename or checkpoint}: {error.strerror}"
    if weights > _MOST_WEIGHTS or weights * tokens > _MOST_WORK:
        return f"{human_bytes(weights)} of weights are too many for a quick look"
    return ""


def absolute(path: Path) -> Path:
    """The path as every process of this machine has it; raises UsageError where this process is nowhere."""
    try:
        return path.absolute()
    except OSError as error:
        raise UsageError(f"the working folder is gone ({error.strerror}); call again in one that is there") from error


def make_or_refuse(output: Path) -> bool:
    """Whether the folder is made just now; what is removed afterwards must have been empty before.

    Raises:
        Conflict: it holds something.
        UsageError: it cannot be used.
    """
    try:
        if output.exists():
            if any(output.iterdir()):
                raise Conflict(f"{output} is not empty; give --output a new folder")
            return False
        output.mkdir(parents=True)
        return True
    except OSError as error:
        raise UsageError(f"{str(output)[:300]} cannot be used: {error.strerror}; {SHARED}") from error


def _no_checkpoint(folder: Path) -> str:
    """What keeps a folder from being a checkpoint's; empty if nothing."""
    try:
        return "" if (folder / "config.json").is_file() else "it has no config.json"
    except OSError as error:  # not ours to look into, or no name at all
        return error.strerror or str(error)

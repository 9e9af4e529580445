"""Reads what lies in a dump folder: dumps, lost notices and the engine's card; links are never followed."""

from __future__ import annotations

import json
import os
import re
import stat
from itertools import pairwise
from pathlib import Path
from typing import Any

from headrace.dumps import (
    POST_NORM,
    PRE_NORM,
    SITE_FILE,
    Dump,
    EngineCard,
    EngineProblem,
    Lost,
    check_schema,
    decode_metadata,
)
from headrace.errors import Unreadable
from headrace.finalnorm import FinalNorm, norm_file
from headrace.records import build
from headrace.tensorfile import MAX_HEADER, decode_header

_BOOT = re.compile(r"[a-z0-9]{1,64}")
_MAX_IDS = 8 << 24  # bytes; a sparse file may claim more than there is memory
_MAX_WIDTH, _MAX_LAYERS, _MAX_NAME = 1 << 20, 1 << 16, 4096
_DTYPES = ("BF16", "F16", "F32")
_MAX_NORM = 8 << 20  # bytes; a million float32 weights and a header


def read_dump(path: Path) -> Dump:
    """Read a dump's header and token ids, never its states; a link is not followed.

    Raises:
        Unreadable: the file is torn, of another or newer schema, or not a regular file.
        FileNotFoundError: it is gone.
    """
    with open_nofollow(path) as file:
        size = os.fstat(file.fileno()).st_size
        head = file.read(MAX_HEADER + 8)
        tensors, metadata, offset = decode_header(head, size)
        header = decode_metadata(tensors, metadata)
        ids = tensors["token_ids"]
        if ids.nbytes > _MAX_IDS:
            raise Unreadable(f"{ids.nbytes} bytes of token ids are more than any context holds")
        file.seek(offset + ids.begin)
        encoded = file.read(ids.nbytes)
    if len(encoded) != ids.nbytes:
        raise Unreadable("the file was cut while it was read")
    return Dump(header=header, token_ids=encoded, data_offset=offset, file_size=size)


def open_nofollow(path: Path) -> Any:
    """Open a regular file for reading in binary, unbuffered; raises Unreadable for a link or another kind."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise Unreadable(f"{path.name}: {error.strerror}") from error
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise Unreadable(f"{path.name} is not a regular file")
    return os.fdopen(descriptor, "rb", buffering=0)


def read_card(path: Path) -> EngineCard:
    """Read `engine.json`; raises Unreadable, or FileNotFoundError when no engine has started here."""
    table = _json(path)
    try:
        card = build(EngineCard, table)
    except Unreadable as error:
        raise Unreadable(f"{path.name}: {error}") from error
    _check_boot(path, card.boot)
    if problem := _implausible(card):
        raise Unreadable(f"{path.name}: {problem}; restart the engine, or bring it and this service to one version")
    # What an engine says must not lead out of its folder.
    if card.norm_file not in ("", norm_file(card.boot)):
        wanted = f"its final norm is {norm_file(card.boot)}, or none"
        raise Unreadable(f"{path.name}: {wanted}, not {card.norm_file[:80]!r}")
    return card


def read_problem(path: Path) -> EngineProblem:
    """Read `engine.problem.json`; raises Unreadable, or FileNotFoundError when the engine reports no problem."""
    table = _json(path)
    try:
        problem = build(EngineProblem, table)
    except Unreadable as error:
        raise Unreadable(f"{path.name}: {error}") from error
    _check_boot(path, problem.boot)
    return problem


def read_lost(path: Path) -> Lost:
    """Read a `lost.json`; raises Unreadable, or FileNotFoundError."""
    table = _json(path)
    try:
        return build(Lost, table)
    except Unreadable as error:
        raise Unreadable(f"{path.name}: {error}") from error


def read_norm(path: Path) -> FinalNorm:
    """Read a final norm's file; raises Unreadable, or FileNotFoundError."""
    with open_nofollow(path) as file:
        data = file.read(_MAX_NORM)
    try:
        return FinalNorm.decode(data)
    except Unreadable as error:
        raise Unreadable(f"{path.name}: {error}") from error


def read_site(folder: Path) -> str | None:
    """The site's id that the watcher wrote into the folder; None before it did."""
    try:
        with open_nofollow(folder / SITE_FILE) as file:
            name = file.read(64).decode("ascii", "replace").strip()
    except FileNotFoundError:
        return None
    return name if name.isalnum() else None


def _implausible(card: EngineCard) -> str:
    """What in a card no engine can mean; empty if nothing. Sizes and memory are reckoned from it."""
    if not 1 <= card.hidden_size <= _MAX_WIDTH or not 1 <= card.layers <= _MAX_LAYERS:
        return f"{card.layers} layers of {card.hidden_size} are no model's"
    ascending = all(low < high for low, high in pairwise(card.boundaries))
    if not card.boundaries or not ascending or card.boundaries[0] < 0 or card.boundaries[-1] > card.layers:
        return f"boundaries {str(list(card.boundaries))[:80]} are none of {card.layers} layers"
    if card.final_state not in (PRE_NORM, POST_NORM) or card.dtype not in _DTYPES:
        return f"a final state {card.final_state[:40]!r} in {card.dtype[:40]!r} is none that a dump has"
    if max(map(len, (card.model, card.fingerprint, card.weight_version))) > _MAX_NAME:
        return f"a name of more than {_MAX_NAME} characters"
    return ""


def _check_boot(path: Path, boot: str) -> None:
    if not _BOOT.fullmatch(boot):
        raise Unreadable(f"{path.name}: a boot is named by lower-case letters and digits, not {boot[:80]!r}")


def _json(path: Path) -> dict[str, Any]:
    with open_nofollow(path) as file:
        data = file.read(1 << 20)
    try:
        table = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise Unreadable(f"{path.name} is not JSON: {error}") from error
    if not isinstance(table, dict):
        raise Unreadable(f"{path.name} is not a JSON object")
    check_schema(table.get("schema"))
    return table

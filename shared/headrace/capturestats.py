"""`stats.{boot}.json` in a dump folder: what the capture core did since its boot, and what that cost the engine."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from headrace.dumpfolder import open_nofollow
from headrace.dumps import SCHEMA, check_schema
from headrace.errors import Unreadable

_MAX_BYTES = 1 << 16


@dataclass(frozen=True, slots=True, kw_only=True)
class CaptureStats:
    """The books of one boot.

    Requests: `published` (`published_bytes` are whole files), `lost` by reason, `ignored` pieces that nobody captures,
    `half_assembled` now. Forwards: `forwards` had rows of ours; the latest of them took the scheduler's thread
    `forward_ms_p50`, `forward_ms_p99` and at most `forward_ms_max` milliseconds each, waits for the buffer included, of
    which there were `waited_ms` in all since the boot. Memory: `buffer_bytes` of the host buffer's `ring_bytes` are in
    use; `pinned_bytes` of it are registered with CUDA, and `device_bytes` are held on the device.
    """

    boot: str
    published: int
    published_bytes: int
    lost: Mapping[str, int]
    ignored: int
    half_assembled: int
    forwards: int
    forward_ms_p50: float
    forward_ms_p99: float
    forward_ms_max: float
    waited_ms: float
    buffer_bytes: int
    ring_bytes: int
    pinned_bytes: int
    device_bytes: int
    schema: int = SCHEMA

    def encode(self) -> bytes:
        """Encode as one line of JSON."""
        return json.dumps(asdict(self)).encode() + b"\n"


def stats_file(boot: str) -> str:
    """The name in a dump folder of a boot's statistics."""
    return f"stats.{boot}.json"


def read_stats(path: Path) -> CaptureStats:
    """Read a boot's statistics; raises Unreadable, or FileNotFoundError before the first are written."""
    with open_nofollow(path) as file:
        data = file.read(_MAX_BYTES)
    try:
        table = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise Unreadable(f"{path.name} is not JSON: {error}") from error
    if not isinstance(table, dict):
        raise Unreadable(f"{path.name} is not a JSON object")
    check_schema(table.get("schema"))
    names = {field.name for field in fields(CaptureStats)}
    if set(table) != names:
        raise Unreadable(f"{path.name}: {str(sorted(set(table) ^ names))[:200]} missing or unknown")
    for field in fields(CaptureStats):
        if not _CHECKS[str(field.type)](table[field.name]):
            raise Unreadable(f"{path.name}: {field.name} is {str(table[field.name])[:40]!r}, not a {field.type}")
    return CaptureStats(**table)


def _whole(value: Any) -> bool:
    return type(value) is int and 0 <= value < 1 << 63


def _number(value: Any) -> bool:
    return _whole(value) or (type(value) is float and math.isfinite(value) and value >= 0)


def _counts(value: Any) -> bool:
    return isinstance(value, dict) and all(_whole(count) for count in value.values())


_CHECKS: Mapping[str, Callable[[Any], bool]] = {
    "str": lambda value: isinstance(value, str),
    "int": _whole,
    "float": _number,
    "Mapping[str, int]": _counts,
}

"""What a dump and the notes beside it hold: one request's states as the capture core publishes them."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from headrace.errors import Unreadable
from headrace.tensorfile import TensorInfo, encode_header, layout

SCHEMA = 1
DUMP_SUFFIX = ".safetensors"
LOST_SUFFIX = ".lost.json"
ENGINE_FILE = "engine.json"
PROBLEM_FILE = "engine.problem.json"
SITE_FILE = ".site"
LOCK_FILE = ".watcher.lock"
PRE_NORM, POST_NORM = "pre_norm", "post_norm"
CHECKSUM_PREFIX = "xxh3:"
NO_CHECKSUM = CHECKSUM_PREFIX + "0" * 16
FOLDER_MODE, FILE_MODE = 0o2770, 0o640


@dataclass(frozen=True, slots=True, kw_only=True)
class Stats:
    """Statistics of one boundary's rows (or the final state's) in a dump, computed on the device.

    `layer` is the boundary, or `final`; `not_finite` counts values that are NaN or infinite; the norms are
    the smallest and largest Euclidean norm of a row.
    """

    layer: str
    not_finite: int
    norm_min: float
    norm_max: float


@dataclass(frozen=True, slots=True, kw_only=True)
class DumpHeader:
    """What a dump says of itself.

    `boundaries` are read back from the model; `checksum` is xxh3-64 over the data section as `xxh3:` and 16
    hex digits; `tensors` are `token_ids` [N] int64, `aux` [N, k*D] with boundaries low to high, `final` [N, D].
    """

    request: str
    tokens: int
    boundaries: tuple[int, ...]
    final_state: str
    parts: int
    retractions: int
    weight_version: str
    model: str
    engine: str
    stats: tuple[Stats, ...]
    checksum: str
    tensors: Mapping[str, TensorInfo]
    schema: int = SCHEMA

    def metadata(self) -> dict[str, str]:
        """The header's metadata strings, the checksum last."""
        return {
            "schema": str(self.schema),
            "request": self.request,
            "tokens": str(self.tokens),
            "boundaries": json.dumps(self.boundaries),
            "final_state": self.final_state,
            "parts": str(self.parts),
            "retractions": str(self.retractions),
            "weight_version": self.weight_version,
            "model": self.model,
            "engine": self.engine,
            "stats": json.dumps([_stats_table(entry) for entry in self.stats]),
            "checksum": self.checksum,
        }

    def encode(self, width: int | None = None) -> bytes:
        """Encode the file's header, padded to `width` bytes; the data follows it."""
        return encode_header(self.tensors, self.metadata(), width)


@dataclass(frozen=True, slots=True, kw_only=True)
class Dump:
    """A dump's header, its token ids as little-endian int64, and where and how large it is."""

    header: DumpHeader
    token_ids: bytes
    data_offset: int
    file_size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineCard:
    """`engine.json`: what the plugin declares once a boot, before the first dump.

    `boot` names one life of the engine's process; `fingerprint` is SGLang's (or the engine's) version, model
    path and revision, dtype, tensor-parallel size and the final norm's digest in one line (see
    `finalnorm.with_norm`); `norm_file` is `finalnorm.norm_file(boot)`, or empty where the norm cannot be had.
    """

    boot: str
    model: str
    fingerprint: str
    weight_version: str
    boundaries: tuple[int, ...]
    final_state: str
    layers: int
    hidden_size: int
    dtype: str
    norm_file: str
    schema: int = SCHEMA


@dataclass(frozen=True, slots=True, kw_only=True)
class Lost:
    """`{request}.lost.json`: why a request's states cannot be published."""

    request: str
    reason: str
    detail: str
    boot: str
    schema: int = SCHEMA


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineProblem:
    """`engine.problem.json`: why this boot of the engine captures nothing, left in the place of its card.

    `problem` names what is missing or in the way and what to change, in one or a few lines.
    """

    boot: str
    problem: str
    schema: int = SCHEMA


def dump_layout(tokens: int, boundaries: int, hidden_size: int, dtype: str) -> dict[str, TensorInfo]:
    """Lay out a dump of `tokens` rows, `boundaries` auxiliary states of `hidden_size` in `dtype` (BF16, F16, F32)."""
    return layout(
        [
            ("token_ids", "I64", (tokens,)),
            ("aux", dtype, (tokens, boundaries * hidden_size)),
            ("final", dtype, (tokens, hidden_size)),
        ]
    )


def encode_json(value: EngineCard | EngineProblem | Lost) -> bytes:
    """Encode a card, a problem notice or a lost notice as one line of JSON."""
    return json.dumps(asdict(value)).encode() + b"\n"


def check_schema(schema: Any) -> None:
    """Raise Unreadable for what is no schema number, or a newer one than this code knows."""
    if type(schema) is not int or schema < 1:
        raise Unreadable(f"schema {schema!r} is not a headrace schema")
    if schema > SCHEMA:
        raise Unreadable(f"schema {schema} is newer than this headrace knows ({SCHEMA}); upgrade this service")


def decode_metadata(tensors: Mapping[str, TensorInfo], metadata: Mapping[str, str]) -> DumpHeader:
    """Make the header of a dump from the safetensors header's parts; raises Unreadable."""
    try:
        check_schema(int(metadata["schema"]))
        header = DumpHeader(
            request=metadata["request"],
            tokens=int(metadata["tokens"]),
            boundaries=tuple(_whole(b) for b in json.loads(metadata["boundaries"])),
            final_state=metadata["final_state"],
            parts=int(metadata["parts"]),
            retractions=int(metadata["retractions"]),
            weight_version=metadata["weight_version"],
            model=metadata["model"],
            engine=metadata["engine"],
            stats=tuple(_stats(entry) for entry in json.loads(metadata["stats"])),
            checksum=metadata["checksum"],
            tensors=tensors,
        )
    except (KeyError, ValueError, TypeError, OverflowError, RecursionError) as error:
        raise Unreadable(f"the dump's metadata: {type(error).__name__}: {str(error)[:200]}") from error
    if set(tensors) != {"token_ids", "aux", "final"} or tensors["token_ids"].dtype != "I64":
        raise Unreadable(f"a dump holds token_ids (I64), aux and final, not {str(sorted(tensors))[:200]}")
    if not re.fullmatch(CHECKSUM_PREFIX + "[0-9a-f]{16}", header.checksum):
        raise Unreadable(f"checksum {header.checksum[:40]!r} is not xxh3 and 16 hex digits")
    return header


def _whole(value: Any) -> int:
    if type(value) is not int:
        raise ValueError(f"{value!r} is not a whole number")
    return value


def _stats_table(entry: Stats) -> dict[str, Any]:
    # Not asdict, which copies deeply: this runs in the engine, for each dump, beside its scheduler.
    return {
        "layer": entry.layer,
        "not_finite": entry.not_finite,
        "norm_min": entry.norm_min,
        "norm_max": entry.norm_max,
    }


def _stats(entry: Mapping[str, Any]) -> Stats:
    return Stats(
        layer=str(entry["layer"]),
        not_finite=_whole(entry["not_finite"]),
        norm_min=float(entry["norm_min"]),
        norm_max=float(entry["norm_max"]),
    )

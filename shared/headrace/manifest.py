"""The dataset folder: `headrace.json`, `manifest/*.jsonl`, and the reader of both."""

from __future__ import annotations

import builtins
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import orjson
from pydantic import ConfigDict, TypeAdapter, ValidationError

from headrace.errors import Unreadable
from headrace.records import build, check_schema
from headrace.runs import Identity, RunSpec

SCHEMA = 1
DATASET_FILE = "headrace.json"
MANIFEST_FOLDER = "manifest"
INPUTS_FOLDER = "inputs"
SPEC_FILE = "run.json"  # in INPUTS_FOLDER: the run that was submitted, written last
SEGMENT_SUFFIX = ".jsonl"

Status = Literal["stored", "rejected", "failed"]
STATUSES: tuple[Status, ...] = get_args(Status)


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One sample's line in the manifest; the line is the commit of its row.

    `sample` is the id that the user gave it. For a stored sample `path` is relative to the dataset's folder,
    `bytes` the size of the row's file and `checksum` xxh3-64 over that whole file as `xxh3:` and 16 hex digits;
    for another the three are empty and `reason` says why. `proof` is `ids`: proven by token ids. `at` is UTC.
    """

    __pydantic_config__ = ConfigDict(strict=True, extra="forbid")

    ordinal: int
    sample: str
    status: Status
    reason: str
    request: str
    tokens: int
    path: str
    bytes: int
    checksum: str
    boundaries: tuple[int, ...]
    proof: str
    at: str
    schema: int = SCHEMA

    def encode(self) -> builtins.bytes:
        """Encode as one line of JSON, its newline included."""
        return orjson.dumps(asdict(self)) + b"\n"


_LINE: TypeAdapter[Line] = TypeAdapter(Line)


def decode_line(data: bytes) -> Line:
    """Decode one line; raises Unreadable for another form or an unknown schema."""
    try:
        table = orjson.loads(data)
        if isinstance(table, dict) and isinstance(table.get("schema"), int):
            check_schema(table["schema"], SCHEMA, "manifest line of")
        return _LINE.validate_json(data)
    except (orjson.JSONDecodeError, ValidationError) as error:
        raise Unreadable(f"manifest line {data[:80]!r}: {error}") from error


@dataclass(frozen=True, slots=True, kw_only=True)
class Dataset:
    """`headrace.json`: the run that the folder holds and the engine that made its rows. Written once."""

    spec: RunSpec
    identity: Identity
    schema: int = SCHEMA

    def encode(self) -> bytes:
        """Encode as indented JSON."""
        return json.dumps(asdict(self), indent=2).encode() + b"\n"


def read_dataset(folder: Path) -> Dataset | None:
    """Read `headrace.json`; None when the folder holds no row yet.

    Raises:
        Unreadable: the file is of another form or of a newer schema.
    """
    path = folder / DATASET_FILE
    try:
        table: dict[str, Any] = json.loads(path.read_bytes())
    except FileNotFoundError:
        return None
    except (ValueError, RecursionError) as error:
        raise Unreadable(f"{path} is not JSON: {error}") from error
    try:
        check_schema(table["schema"], SCHEMA)
        return Dataset(
            spec=RunSpec.decode(json.dumps(table["spec"]).encode()), identity=build(Identity, table["identity"])
        )
    except (Unreadable, KeyError, TypeError, AttributeError) as error:
        raise Unreadable(f"{path}: {type(error).__name__}: {error}") from error


def read_submitted(folder: Path) -> RunSpec | None:
    """Read the spec of the run whose inputs lie in a dataset's folder; None when there are none.

    Raises:
        Unreadable: the file is of another form or of a newer schema.
    """
    try:
        return RunSpec.decode((folder / INPUTS_FOLDER / SPEC_FILE).read_bytes())
    except FileNotFoundError:
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Damage:
    """A line of a segment that cannot be read; `number` counts from 1."""

    segment: str
    number: int
    problem: str


class ManifestReader:
    """Reads the segments of a manifest, each further from where it stopped; an unterminated tail is ignored.

    Memory is one offset per segment: what the lines say is the caller's to keep.
    """

    def __init__(self, folder: Path) -> None:
        """Read `folder`/manifest; it need not exist yet."""
        self._folder = folder / MANIFEST_FOLDER
        self._position: dict[str, tuple[int, int]] = {}

    def read_new(self, mentioning: bytes = b"") -> Iterator[Line | Damage]:
        """Yield every line that was completed since the last call, damaged ones as `Damage`.

        Lines without the bytes `mentioning` are passed over undecoded: the quick way to one sample's lines. A segment
        that vanishes, or a link to nothing, is passed over as well. Raises OSError for one that cannot be read.
        """
        try:
            paths = sorted(self._folder.iterdir())
        except (FileNotFoundError, NotADirectoryError):
            return
        for path in paths:
            if path.suffix == SEGMENT_SUFFIX:
                yield from self._read_segment(path, mentioning)

    def _read_segment(self, path: Path, mentioning: bytes) -> Iterator[Line | Damage]:
        offset, number = self._position.get(path.name, (0, 0))
        try:
            if path.stat().st_size <= offset:
                return
            file = path.open("rb")
        except FileNotFoundError:
            return
        with file:
            file.seek(offset)
            for data in file:
                if not data.endswith(b"\n"):
                    break
                offset, number = offset + len(data), number + 1
                self._position[path.name] = (offset, number)
                if data.strip() and mentioning in data:
                    yield _line_or_damage(path.name, number, data)


def _line_or_damage(segment: str, number: int, data: bytes) -> Line | Damage:
    try:
        return decode_line(data)
    except Unreadable as error:
        return Damage(segment=segment, number=number, problem=str(error))

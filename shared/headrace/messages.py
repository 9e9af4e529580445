"""What travels through the storage queue: frozen values, msgpack, a schema version, decoded strictly at the edge."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Annotated, Any, Literal

import msgpack
from pydantic import ConfigDict, Field, TypeAdapter, ValidationError

from headrace.errors import InvalidId, Unreadable
from headrace.ids import RequestId

SCHEMA = 1
MAX_RECORDS = 500


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreJob:
    """Store the dump of `request`, which lies in the site's folder under a name that follows from it.

    `mask` is the loss mask as run lengths (`headrace.masks`); `job` is k, which fences older jobs;
    `engine` and `weight_version` are the run's identity.
    """

    __pydantic_config__ = ConfigDict(strict=True, extra="forbid", revalidate_instances="always")

    request: str
    sample: str
    job: int
    mask: tuple[int, ...]
    engine: str
    weight_version: str
    kind: Literal["store"] = "store"
    schema: int = SCHEMA

    @property
    def id(self) -> RequestId:
        """The request id, parsed."""
        return RequestId.parse(self.request)


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """One sample that gets a manifest line and no row.

    `mask`, the loss mask as run lengths, is there for a failed sample whose `request` is known: with both, a row that
    lies in its place can be proven to be its own.
    """

    __pydantic_config__ = ConfigDict(strict=True, extra="forbid", revalidate_instances="always")

    ordinal: int
    sample: str
    status: Literal["rejected", "failed"]
    reason: str
    request: str
    tokens: int
    mask: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordJob:
    """Write the lines of rejected and failed samples of `run`, at most `MAX_RECORDS` of them."""

    __pydantic_config__ = ConfigDict(strict=True, extra="forbid", revalidate_instances="always")

    run: str
    records: Annotated[tuple[Record, ...], Field(max_length=MAX_RECORDS)]
    kind: Literal["record"] = "record"
    schema: int = SCHEMA


Job = StoreJob | RecordJob

_ADAPTERS: dict[str, TypeAdapter[Any]] = {"store": TypeAdapter(StoreJob), "record": TypeAdapter(RecordJob)}


def encode(job: Job) -> bytes:
    """Encode a job."""
    packed: bytes = msgpack.packb(asdict(job), use_bin_type=True)
    return packed


def decode(data: bytes) -> Job:
    """Decode a job.

    Raises:
        Unreadable: the bytes are not one of our jobs, or of a newer schema.
    """
    try:
        table = msgpack.unpackb(data, raw=False, use_list=False)
        schema, kind = table["schema"], table["kind"]
        if type(schema) is not int or schema < 1:
            raise Unreadable(f"storage job: schema {schema!r} is not a headrace schema")
        if schema > SCHEMA:
            raise Unreadable(f"job of schema {schema} is newer than this headrace knows ({SCHEMA}); upgrade the writer")
        # Strict validation takes instances only: the constructors refuse unknown names, the adapters wrong types.
        if kind == "record":
            table["records"] = tuple(Record(**entry) for entry in table["records"])
        job: Job = _ADAPTERS[kind].validate_python((StoreJob if kind == "store" else RecordJob)(**table))
        # An id that does not parse is no job of ours.
        for request in [job.request] if isinstance(job, StoreJob) else [r.request for r in job.records if r.mask]:
            RequestId.parse(request)
    except (ValueError, TypeError, KeyError, ValidationError, InvalidId, msgpack.exceptions.UnpackException) as error:
        raise Unreadable(f"storage job: {type(error).__name__}: {error}") from error
    return job

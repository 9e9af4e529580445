"""The `headrace` format: one safetensors file per row, in the dtype of the dump, with its origin as metadata."""

from __future__ import annotations

import io
import json
from collections.abc import Mapping
from pathlib import PurePosixPath

import numpy as np

from headrace.errors import Unreadable
from headrace.masks import decode_mask
from headrace.tensorfile import MAX_HEADER, TensorInfo, decode_header, encode_header, layout
from headrace_writer.formats.base import STATE_DTYPES, Format, Origin, Row, RowSource, States

SCHEMA = 1
ROWS_PER_FOLDER = 1000


class HeadraceFormat(Format):
    """`rows/{ordinal//1000:06d}/{ordinal:09d}.safetensors`.

    `token_ids` and `loss_mask` are I64 [N], `aux` [N, k*D] with boundaries low to high, `final` [N, D].
    """

    name = "headrace"

    def path(self, ordinal: int) -> PurePosixPath:
        """The row's file, relative to the dataset's folder."""
        return PurePosixPath(f"rows/{ordinal // ROWS_PER_FOLDER:06d}/{ordinal:09d}.safetensors")

    def write(self, source: RowSource, file: io.RawIOBase) -> None:
        """Stream one row."""
        tokens = source.request.tokens
        tensors = layout(
            [
                ("token_ids", "I64", (tokens,)),
                ("loss_mask", "I64", (tokens,)),
                ("aux", source.aux.info.dtype, source.aux.info.shape),
                ("final", source.final.info.dtype, source.final.info.shape),
            ]
        )
        file.write(encode_header(tensors, _metadata(source)))
        file.write(source.token_ids)
        file.write(np.frombuffer(decode_mask(source.mask), np.uint8).astype("<i8").tobytes())
        file.write(source.aux.buffer)
        file.write(source.final.buffer)

    def parse(self, name: str, data: memoryview) -> Row:
        """Read a row back from a map of its whole file; raises Unreadable."""
        tensors, metadata, offset = decode_header(bytes(data[: MAX_HEADER + 8]), len(data))
        _check_tensors(tensors)
        data = data[offset:]
        mask = np.frombuffer(_slice(data, tensors["loss_mask"]), "<i8")
        if ((mask != 0) & (mask != 1)).any():
            raise Unreadable(f"{name}: loss_mask holds values other than 0 and 1")
        return Row(
            token_ids=bytes(_slice(data, tensors["token_ids"])),
            loss_mask=mask.astype(np.uint8).tobytes(),
            aux=States(info=tensors["aux"], buffer=_slice(data, tensors["aux"])),
            final=States(info=tensors["final"], buffer=_slice(data, tensors["final"])),
            origin=_origin(metadata),
        )


def _metadata(source: RowSource) -> dict[str, str]:
    return {
        "schema": str(SCHEMA),
        "run": source.request.run,
        "ordinal": str(source.request.ordinal),
        "sample": source.sample,
        "request": str(source.request),
        "boundaries": json.dumps(source.header.boundaries),
        "final_state": source.header.final_state,
        "model": source.header.model,
        "engine": source.header.engine,
        "weight_version": source.header.weight_version,
    }


def _origin(metadata: Mapping[str, str]) -> Origin:
    try:
        schema = int(metadata["schema"])
        if schema > SCHEMA:
            raise Unreadable(f"row of schema {schema} is newer than this headrace knows ({SCHEMA}); upgrade it")
        return Origin(
            run=metadata["run"],
            ordinal=int(metadata["ordinal"]),
            sample=metadata["sample"],
            request=metadata["request"],
            boundaries=tuple(int(b) for b in json.loads(metadata["boundaries"])),
            final_state=metadata["final_state"],
            model=metadata["model"],
            engine=metadata["engine"],
            weight_version=metadata["weight_version"],
        )
    except (KeyError, ValueError, TypeError, RecursionError) as error:
        raise Unreadable(f"the row's metadata: {type(error).__name__}: {error}") from error


def _check_tensors(tensors: Mapping[str, TensorInfo]) -> None:
    if set(tensors) != {"token_ids", "loss_mask", "aux", "final"}:
        raise Unreadable(f"a row holds token_ids, loss_mask, aux and final, not {sorted(tensors)}")
    for name, dtypes, dimensions in (
        ("token_ids", {"I64"}, 1),
        ("loss_mask", {"I64"}, 1),
        ("aux", STATE_DTYPES, 2),
        ("final", STATE_DTYPES, 2),
    ):
        info = tensors[name]
        if info.dtype not in dtypes or len(info.shape) != dimensions:
            raise Unreadable(f"{name} is {info.dtype} {info.shape}")


def _slice(data: memoryview, info: TensorInfo) -> memoryview:
    return data[info.begin : info.end]

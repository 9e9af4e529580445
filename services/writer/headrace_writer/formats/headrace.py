"""The `headrace` format: one safetensors file per row, in the dtype of the dump, with its origin as metadata."""

from __future__ import annotations

import io
from collections.abc import Mapping
from pathlib import PurePosixPath

from headrace.errors import Unreadable
from headrace.tensorfile import MAX_HEADER, TensorInfo, decode_header, encode_header, layout
from headrace_writer.destination import file_checksum
from headrace_writer.formats.base import (
    STATE_DTYPES,
    Format,
    Row,
    RowSource,
    States,
    decode_loss_mask,
    encode_loss_mask,
)
from headrace_writer.formats.origin import decode_origin, encode_origin

ROWS_PER_FOLDER = 1000
# What a dump's data section holds, in order: a row takes over the checksum that its dump was verified by.
_SUMMED = ("token_ids", "aux", "final")
_CHECKSUM = "checksum"


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
        metadata = encode_origin(source, source.header.final_state)
        if _in_order(source.header.tensors) == list(_SUMMED):
            metadata[_CHECKSUM] = source.header.checksum
        file.write(encode_header(tensors, metadata))
        file.write(source.token_ids)
        file.write(encode_loss_mask(source.mask))
        file.write(source.aux.buffer)
        file.write(source.final.buffer)

    def parse(self, name: str, data: memoryview) -> Row:
        """Read a row back from a map of its whole file; raises Unreadable."""
        tensors, metadata, offset = decode_header(bytes(data[: MAX_HEADER + 8]), len(data))
        _check_tensors(tensors)
        data = data[offset:]
        return Row(
            token_ids=bytes(_slice(data, tensors["token_ids"])),
            loss_mask=decode_loss_mask(_slice(data, tensors["loss_mask"])),
            aux=States(info=tensors["aux"], buffer=_slice(data, tensors["aux"])),
            final=States(info=tensors["final"], buffer=_slice(data, tensors["final"])),
            origin=decode_origin(metadata),
        )

    def check_sums(self, name: str, data: memoryview) -> None:
        """Compare ids and states with the dump's checksum; raises Unreadable. Rows of the first versions have none."""
        tensors, metadata, offset = decode_header(bytes(data[: MAX_HEADER + 8]), len(data))
        _check_tensors(tensors)
        if _CHECKSUM not in metadata:
            return
        found = file_checksum(*(_slice(data[offset:], tensors[part]) for part in _SUMMED))
        if found != metadata[_CHECKSUM]:
            raise Unreadable(f"{name}: ids and states are {found}, its metadata say {metadata[_CHECKSUM][:40]!r}")


def _in_order(tensors: Mapping[str, TensorInfo]) -> list[str]:
    return sorted(tensors, key=lambda name: (tensors[name].begin, tensors[name].end))


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

"""The safetensors header, written and read without the library: a fixed width, no tensor touched.

Format: https://github.com/huggingface/safetensors#format (8 bytes of header length, JSON, data).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from headrace.errors import Unreadable

ITEM_SIZE = {"I64": 8, "F32": 4, "BF16": 2, "F16": 2, "U8": 1}
MAX_HEADER = 1 << 20
_MAX_DIMENSIONS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorInfo:
    """One tensor: dtype in safetensors' spelling, shape, and bytes [begin, end) of the data section."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor."""
        return self.end - self.begin


def layout(tensors: Sequence[tuple[str, str, tuple[int, ...]]]) -> dict[str, TensorInfo]:
    """Lay tensors, given as (name, dtype, shape), out without gaps in the given order."""
    placed: dict[str, TensorInfo] = {}
    position = 0
    for name, dtype, shape in tensors:
        end = position + ITEM_SIZE[dtype] * prod(shape)
        placed[name] = TensorInfo(dtype=dtype, shape=shape, begin=position, end=end)
        position = end
    return placed


def encode_header(tensors: Mapping[str, TensorInfo], metadata: Mapping[str, str], width: int | None = None) -> bytes:
    """Encode a header, its 8 length bytes included, padded with spaces to `width` bytes.

    Raises:
        ValueError: the header does not fit `width`.
    """
    table: dict[str, Any] = {"__metadata__": dict(metadata)}
    for name, info in tensors.items():
        table[name] = {"dtype": info.dtype, "shape": list(info.shape), "data_offsets": [info.begin, info.end]}
    body = json.dumps(table, separators=(",", ":"), ensure_ascii=True).encode()
    total = width if width is not None else (8 + len(body) + 7) // 8 * 8
    if 8 + len(body) > total:
        raise ValueError(f"a header of {8 + len(body)} bytes does not fit {total}")
    return (total - 8).to_bytes(8, "little") + body.ljust(total - 8)


def decode_header(head: bytes, file_size: int) -> tuple[dict[str, TensorInfo], dict[str, str], int]:
    """Decode the start of a file that holds at least its whole header.

    Args:
        head: the file's first bytes, `MAX_HEADER + 8` of them or all.
        file_size: bytes of the whole file; the data section must fill it exactly.

    Returns:
        The tensors by name, the metadata, and the offset of the data section.

    Raises:
        Unreadable: the header is torn, larger than 1 MiB, or does not describe the file.
    """
    if len(head) < 8:
        raise Unreadable(f"{file_size} bytes are too few for a safetensors file")
    length = int.from_bytes(head[:8], "little")
    if length > MAX_HEADER or 8 + length > len(head):
        raise Unreadable(f"the header claims {length} bytes, which the file does not hold")
    try:
        table = json.loads(head[8 : 8 + length])
        metadata = table.pop("__metadata__", {})
        tensors = {name: _tensor(name, entry) for name, entry in table.items()}
        for key, value in metadata.items():
            f"{key}{value}".encode()  # JSON can spell half a surrogate pair, which no store takes
            if not isinstance(value, str):
                raise Unreadable("the header's metadata must be strings")
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise Unreadable(f"the header is not that of a safetensors file: {error}") from error
    _check_offsets(tensors, file_size - 8 - length)
    return tensors, metadata, 8 + length


def _tensor(name: str, entry: Mapping[str, Any]) -> TensorInfo:
    shape = tuple(entry["shape"])
    begin, end = entry["data_offsets"]
    dtype = entry["dtype"]
    if len(shape) > _MAX_DIMENSIONS or dtype not in ITEM_SIZE:
        raise Unreadable(f"tensor {name[:40]!r} has {len(shape)} dimensions and dtype {str(dtype)[:40]!r}")
    if not all(type(n) is int and 0 <= n < 1 << 63 for n in (*shape, begin, end)):
        raise Unreadable(f"tensor {name[:40]!r}: a size or an offset is not a whole number from 0 to 2**63")
    if end - begin != ITEM_SIZE[dtype] * prod(shape):
        raise Unreadable(f"tensor {name[:40]!r}: {end - begin} bytes do not hold {shape} of {dtype}")
    return TensorInfo(dtype=dtype, shape=shape, begin=begin, end=end)


def _check_offsets(tensors: Mapping[str, TensorInfo], data_bytes: int) -> None:
    position = 0
    for name, info in sorted(tensors.items(), key=lambda item: (item[1].begin, item[1].end)):
        if info.begin != position:
            raise Unreadable(f"tensor {name[:40]!r} starts at {info.begin}, expected {position}")
        position = info.end
    if position != data_bytes:
        raise Unreadable(f"the tensors take {position} bytes, the file holds {data_bytes}")

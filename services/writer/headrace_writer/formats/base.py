"""What a dataset format is given, what it gives back, and what it must be able to do."""

from __future__ import annotations

import io
import mmap
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from headrace.dumpfolder import open_nofollow
from headrace.dumps import DumpHeader
from headrace.errors import HeadraceError, Unreadable
from headrace.finalnorm import FinalNorm
from headrace.ids import RequestId
from headrace.masks import decode_mask
from headrace.tensorfile import TensorInfo


class NotFinite(HeadraceError):
    """A state that the format derives is NaN or infinite; the sample must be extracted again."""


STATE_DTYPES = frozenset({"BF16", "F16", "F32"})


@dataclass(frozen=True, slots=True, kw_only=True)
class States:
    """Hidden states as they lie in a file: `info` tells dtype and shape, `buffer` is a flat map of their bytes."""

    info: TensorInfo
    buffer: memoryview


@dataclass(frozen=True, slots=True, kw_only=True)
class RowSource:
    """One proven dump and the sample it belongs to: what a row is made from.

    `token_ids` is [N] little-endian int64; `mask` the loss mask as run lengths; `aux` [N, k*D] and `final`
    [N, D] are maps of the dump's file. `norm` is the model's final norm, None where it is not known.
    """

    request: RequestId
    sample: str
    header: DumpHeader
    token_ids: bytes
    mask: tuple[int, ...]
    aux: States
    final: States
    norm: FinalNorm | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """Where a row says that it comes from; the fields are those of the request, the run and the dump.

    `final_state` is that of the row, which may have been made from the captured one.
    """

    run: str
    ordinal: int
    sample: str
    request: str
    boundaries: tuple[int, ...]
    final_state: str
    model: str
    engine: str
    weight_version: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A stored row as it was read back, nothing shifted, padded or converted.

    `token_ids` is [N] little-endian int64, `loss_mask` one byte (0 or 1) per token, `aux` [N, k*D] and `final`
    [N, D] are parts of the file's map. `origin` is None where the format has no place for it.
    """

    token_ids: bytes
    loss_mask: bytes
    aux: States
    final: States
    origin: Origin | None


class Format(Protocol):
    """A trainer's layout: one file per row, whose place follows from the ordinal alone."""

    @property
    def name(self) -> str:
        """The name that a run file uses."""

    def path(self, ordinal: int) -> PurePosixPath:
        """The row's file, relative to the dataset's folder."""

    def write(self, source: RowSource, file: io.RawIOBase) -> None:
        """Stream one row; `file` only appends, takes whole buffers of any size, and tells its position.

        Raises:
            NotFinite: a state that is derived on the way is no number; what was written so far is no row.
        """

    def parse(self, name: str, data: memoryview) -> Row:
        """Read a row back from a map of its whole file, its states as parts of it; `name` is for messages.

        Raises:
            Unreadable: the file is torn, or no row of this format.
        """

    def check_sums(self, name: str, data: memoryview) -> None:
        """Compare the content of a file that can be parsed with the sums that it has of it, if any; reads all of it.

        Raises:
            Unreadable: a sum is another one.
        """

    def read(self, path: Path) -> Row:
        """Read a row back from its file.

        Raises:
            Unreadable: as `parse`, or the file is a link or cannot be opened.
            FileNotFoundError: there is none.
        """
        with open_nofollow(path) as file:
            return self.parse(path.name, map_row(file))


def map_row(file: io.RawIOBase) -> memoryview:
    """Map an open row's whole file copy-on-write, since torch warns about buffers that it may not write to.

    Raises:
        Unreadable: it is empty.
    """
    size = os.fstat(file.fileno()).st_size
    if size == 0:
        raise Unreadable("the file is empty")
    return memoryview(mmap.mmap(file.fileno(), size, access=mmap.ACCESS_COPY))


def decode_loss_mask(data: memoryview) -> bytes:
    """A loss mask of little-endian int64 as one byte per token; raises Unreadable for values other than 0 and 1."""
    mask = np.frombuffer(data, "<i8")
    if ((mask != 0) & (mask != 1)).any():
        raise Unreadable("loss_mask holds values other than 0 and 1")
    return mask.astype(np.uint8).tobytes()


def encode_loss_mask(mask: Sequence[int]) -> bytes:
    """A loss mask given as run lengths as little-endian int64."""
    return np.frombuffer(decode_mask(mask), np.uint8).astype("<i8").tobytes()


def as_float32(info: TensorInfo, buffer: memoryview) -> npt.NDArray[np.float32]:
    """Convert states of BF16, F16 or F32 to a float32 array of `info.shape`; F32 is a view, the others copies."""
    if info.dtype == "F32":
        return np.frombuffer(buffer, "<f4").reshape(info.shape)
    if info.dtype == "F16":
        return np.frombuffer(buffer, "<f2").astype(np.float32).reshape(info.shape)
    if info.dtype == "BF16":
        # bfloat16 is the upper half of a float32.
        widened: npt.NDArray[Any] = np.frombuffer(buffer, "<u2").astype(np.uint32) << 16
        return widened.view(np.float32).reshape(info.shape)
    raise ValueError(f"{info.dtype} is no dtype of hidden states; they are {sorted(STATE_DTYPES)}")

"""What a dataset format is given, what it gives back, and what it must be able to do."""

from __future__ import annotations

import io
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from headrace.dumps import DumpHeader
from headrace.ids import RequestId
from headrace.tensorfile import TensorInfo

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
    [N, D] are maps of the dump's file.
    """

    request: RequestId
    sample: str
    header: DumpHeader
    token_ids: bytes
    mask: tuple[int, ...]
    aux: States
    final: States


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """Where a row says that it comes from; the fields are those of the request, the run and the dump."""

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
    [N, D] are maps of the row's file, copy-on-write. `origin` is None where the format has no place for it.
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

    @property
    def final_state(self) -> frozenset[str]:
        """The captured final states that it can be made from."""

    def path(self, ordinal: int) -> PurePosixPath:
        """The row's file, relative to the dataset's folder."""

    def write(self, source: RowSource, file: io.RawIOBase) -> None:
        """Stream one row; `file` only appends, takes whole buffers of any size, and has no descriptor."""

    def read(self, path: Path) -> Row:
        """Read a row back, its states as maps.

        Raises:
            Unreadable: the file is torn, a link, or no row of this format.
            FileNotFoundError: there is none.
        """


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

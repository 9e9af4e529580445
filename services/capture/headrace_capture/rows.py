"""How a batch of rows lies in a buffer, on the host and on the device alike."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from headrace_capture.batching import Batch
from headrace_capture.forward import Forward
from headrace_capture.ring import ALIGN

DTYPES = {torch.bfloat16: "BF16", torch.float16: "F16", torch.float32: "F32"}


@dataclass(frozen=True, slots=True, kw_only=True)
class RowShape:
    """A row of the engine's states: `boundaries` is k, `hidden_size` D, `dtype` that of the states."""

    boundaries: int
    hidden_size: int
    dtype: torch.dtype

    @property
    def width(self) -> int:
        """Values of a row's boundaries, k*D."""
        return self.boundaries * self.hidden_size

    @property
    def row_bytes(self) -> int:
        """Bytes of a row in a buffer: id, norms, boundaries and final."""
        return 8 + (self.boundaries + 1) * (4 + self.hidden_size * self.dtype.itemsize)

    def offsets(self, rows: int) -> tuple[int, int, int, int, int]:
        """Where ids, norms, aux and final begin in a buffer of `rows` rows, in bytes, and where the last one ends.

        Each begins at a multiple of ALIGN, as the device's kernels want it.
        """
        item = self.dtype.itemsize
        norms = _aligned(8 * rows)
        aux = norms + _aligned(4 * (self.boundaries + 1) * rows)
        final = aux + _aligned(self.width * item * rows)
        return 0, norms, aux, final, final + _aligned(self.hidden_size * item * rows)

    def nbytes(self, rows: int) -> int:
        """Bytes of a buffer of `rows` rows."""
        return self.offsets(rows)[4]

    def fitting(self, nbytes: int) -> int:
        """How many rows certainly fit a buffer of `nbytes` bytes."""
        return max(0, (nbytes - 4 * ALIGN) // self.row_bytes)

    def problem(self, forward: Forward, device: torch.device) -> str | None:
        """What is wrong with a forward's tensors, or None."""
        rows = 0
        for piece in forward.pieces:
            if piece.rows < 0 or piece.prefix < 0:
                return "a piece has a negative number of rows"
            rows += piece.rows
        boundaries, ids = forward.boundaries, forward.token_ids
        if len(boundaries) not in (1, self.boundaries):
            return f"the forward has {len(boundaries)} boundaries, the engine declared {self.boundaries}"
        if ids.dim() != 1 or ids.is_floating_point():
            return f"token ids are {ids.dtype} {list(ids.shape)}, not one row of integers"
        width = self.width // len(boundaries)
        for state, values in (*((boundary, width) for boundary in boundaries), (forward.final, self.hidden_size)):
            if state.dim() != 2 or state.shape[1] != values or state.dtype != self.dtype:
                expected = f"{self.dtype} [T, {values}]"
                return f"a state is {state.dtype} {list(state.shape)}, the engine declared {expected}"
        tensors = (ids, *boundaries, forward.final)
        if min(len(tensor) for tensor in tensors) < rows:
            return f"the pieces have {rows} rows, the tensors {[len(tensor) for tensor in tensors]}"
        for tensor in tensors:
            if tensor.device != device:
                return f"the states are on {tensor.device}, the engine declared {device}"
        return None


class Memory:
    """A buffer, seen as each of the types that lie in it; made once, since every view costs a call into torch."""

    __slots__ = ("ids", "norms", "raw", "shape", "states")

    def __init__(self, shape: RowShape, buffer: torch.Tensor) -> None:
        """`buffer` is [n] uint8; bytes beyond the last multiple of ALIGN are not used."""
        self.shape = shape
        self.raw = buffer[: len(buffer) // ALIGN * ALIGN]
        self.ids = self.raw.view(torch.int64)
        self.norms = self.raw.view(torch.float32)
        self.states = self.raw.view(shape.dtype)


class Rows:
    """`count` rows that lie in a buffer from byte `begin` on; each tensor is a view, made when it is asked for."""

    __slots__ = ("_aux", "_final", "_ids", "_memory", "_norms", "begin", "count", "end")

    def __init__(self, memory: Memory, begin: int, count: int) -> None:
        """`begin` is a multiple of ALIGN."""
        _, norms, aux, final, end = memory.shape.offsets(count)
        item = memory.shape.dtype.itemsize
        self._memory = memory
        self.begin, self.end, self.count = begin, begin + end, count
        self._ids = begin // 8
        self._norms = (begin + norms) // 4
        self._aux = (begin + aux) // item
        self._final = (begin + final) // item

    def raw(self) -> torch.Tensor:
        """All bytes, [end - begin] uint8."""
        return self._memory.raw[self.begin : self.end]

    def ids(self) -> torch.Tensor:
        """Token ids, [n] int64."""
        return self._memory.ids.as_strided((self.count,), (1,), self._ids)

    def aux(self) -> torch.Tensor:
        """The boundaries side by side, [n, k*D]."""
        width = self._memory.shape.width
        return self._memory.states.as_strided((self.count, width), (width, 1), self._aux)

    def boundaries(self) -> torch.Tensor:
        """The boundaries, [n, k, D]."""
        shape = self._memory.shape
        size = (self.count, shape.boundaries, shape.hidden_size)
        return self._memory.states.as_strided(size, (shape.width, shape.hidden_size, 1), self._aux)

    def final(self) -> torch.Tensor:
        """The final state, [n, D]."""
        width = self._memory.shape.hidden_size
        return self._memory.states.as_strided((self.count, width), (width, 1), self._final)

    def norms(self, first: int, last: int) -> torch.Tensor:
        """Euclidean norms of rows [first, last), [last - first, k+1] float32: per boundary, and the final state's."""
        columns = self._memory.shape.boundaries + 1
        offset = self._norms + first * columns
        return self._memory.norms.as_strided((last - first, columns), (columns, 1), offset)

    def boundary_norms(self) -> torch.Tensor:
        """The boundaries' norms, [n, k]."""
        columns = self._memory.shape.boundaries + 1
        return self._memory.norms.as_strided((self.count, columns - 1), (columns, 1), self._norms)

    def final_norms(self) -> torch.Tensor:
        """The final state's norms, [n]."""
        columns = self._memory.shape.boundaries + 1
        return self._memory.norms.as_strided((self.count,), (columns,), self._norms + columns - 1)

    def states(self, column: int, first: int, last: int) -> torch.Tensor:
        """Rows [first, last) of one boundary, or with `column` k of the final state, [last - first, D]."""
        if column == self._memory.shape.boundaries:
            return self.final()[first:last]
        return self.boundaries()[first:last, column]

    def sections(self, memory: memoryview, first: int, last: int) -> tuple[memoryview, memoryview, memoryview]:
        """The bytes of ids, aux and final of rows [first, last) in `memory`, the buffer's own."""
        shape = self._memory.shape
        item = shape.dtype.itemsize
        starts = (8 * self._ids, item * self._aux, item * self._final)
        widths = (8, item * shape.width, item * shape.hidden_size)
        ids, aux, final = (
            memory[start + first * width : start + last * width] for start, width in zip(starts, widths, strict=True)
        )
        return ids, aux, final


def gather(forward: Forward, batch: Batch, into: Rows) -> None:
    """Bring a batch's ids and states together in `into`, on the device where they are."""
    begin, end = batch.begin, batch.end
    into.ids().copy_(forward.token_ids[begin:end])
    if len(forward.boundaries) == 1:
        into.aux().copy_(forward.boundaries[0][begin:end])
    else:
        torch.cat([boundary[begin:end] for boundary in forward.boundaries], dim=1, out=into.aux())
    into.final().copy_(forward.final[begin:end])


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGN) * ALIGN

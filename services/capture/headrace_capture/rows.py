"""How a batch of rows lies in a slot, and the copiers that bring it there from the engine's device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from headrace_capture.batching import Batch
from headrace_capture.forward import Forward
from headrace_capture.ring import Slot

DTYPES = {torch.bfloat16: "BF16", torch.float16: "F16", torch.float32: "F32"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Views:
    """A slot of n rows: `ids` [n] int64, `norms` [n, k+1] float32, `aux` [n, k*D] and `final` [n, D].

    `norms` are the rows' Euclidean norms, one column per boundary and the final state's last.
    """

    ids: torch.Tensor
    norms: torch.Tensor
    aux: torch.Tensor
    final: torch.Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class RowShape:
    """A row of the engine's states: `boundaries` is k, `hidden_size` D, `dtype` that of the states."""

    boundaries: int
    hidden_size: int
    dtype: torch.dtype

    @property
    def state_bytes(self) -> int:
        """Bytes of one state of D values."""
        return self.hidden_size * self.dtype.itemsize

    @property
    def row_bytes(self) -> int:
        """Bytes of a row in a slot: id, norms, boundaries and final."""
        return 8 + (self.boundaries + 1) * (4 + self.state_bytes)

    def spans(self, rows: int) -> tuple[tuple[int, int], ...]:
        """Bytes [begin, end) of ids, norms, aux and final in a slot of `rows` rows."""
        sizes = (8, 4 * (self.boundaries + 1), self.boundaries * self.state_bytes, self.state_bytes)
        spans, position = [], 0
        for size in sizes:
            spans.append((position, position + size * rows))
            position += size * rows
        return tuple(spans)

    def views(self, slot: Slot, rows: int) -> Views:
        """See a slot as its tensors."""
        ids, norms, aux, final = (slot.tensor[begin:end] for begin, end in self.spans(rows))
        return Views(
            ids=ids.view(torch.int64),
            norms=norms.view(torch.float32).view(rows, self.boundaries + 1),
            aux=aux.view(self.dtype).view(rows, self.boundaries * self.hidden_size),
            final=final.view(self.dtype).view(rows, self.hidden_size),
        )

    def problem(self, forward: Forward, device: torch.device) -> str | None:
        """What is wrong with a forward's tensors, or None."""
        if any(piece.rows < 0 or piece.prefix < 0 for piece in forward.pieces):
            return "a piece has a negative number of rows"
        rows = sum(piece.rows for piece in forward.pieces)
        states = (*forward.boundaries, forward.final)
        if len(forward.boundaries) != self.boundaries:
            return f"the forward has {len(forward.boundaries)} boundaries, the engine declared {self.boundaries}"
        if forward.token_ids.dim() != 1 or forward.token_ids.is_floating_point():
            return f"token ids are {forward.token_ids.dtype} {list(forward.token_ids.shape)}, not one row of integers"
        for state in states:
            if state.dim() != 2 or state.shape[1] != self.hidden_size or state.dtype != self.dtype:
                expected = f"{self.dtype} [T, {self.hidden_size}]"
                return f"a state is {state.dtype} {list(state.shape)}, the engine declared {expected}"
        if min(len(forward.token_ids), *(len(state) for state in states)) < rows:
            return f"the pieces have {rows} rows, the tensors {[len(t) for t in (forward.token_ids, *states)]}"
        if any(tensor.device.type != device.type for tensor in (forward.token_ids, *states)):
            return f"the states are on {forward.final.device}, the engine declared {device}"
        return None


class Copier(Protocol):
    """Brings a forward's rows into slots."""

    def stage(self, forward: Forward, batches: Sequence[Batch]) -> Sequence[StagedRows]:
        """Take what is needed of the forward; for a device this ends the reads of the caller's tensors."""

    def copy(self, staged: StagedRows, into: Views) -> torch.cuda.Event | None:
        """Fill a slot; with an event, the slot is full when the event has happened."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StagedRows:
    """A batch's rows: ids [n], k boundaries [n, D] each (or one aux [n, k*D]) and final [n, D]."""

    ids: torch.Tensor
    aux: tuple[torch.Tensor, ...]
    final: torch.Tensor


def copier(shape: RowShape, device: torch.device) -> Copier:
    """The copier for an engine's device."""
    return DeviceCopier(shape, device) if device.type == "cuda" else HostCopier(shape)


class HostCopier:
    """Copies on the host: the slot is full when `copy` returns, and nothing else is allocated for the states."""

    def __init__(self, shape: RowShape) -> None:
        self._shape = shape

    @torch.no_grad()
    def stage(self, forward: Forward, batches: Sequence[Batch]) -> Sequence[StagedRows]:
        """Slice the forward's tensors."""
        return [
            StagedRows(
                ids=forward.token_ids[batch.begin : batch.end],
                aux=tuple(state[batch.begin : batch.end] for state in forward.boundaries),
                final=forward.final[batch.begin : batch.end],
            )
            for batch in batches
        ]

    @torch.no_grad()
    def copy(self, staged: StagedRows, into: Views) -> None:
        """Fill the slot and compute the norms."""
        into.ids.copy_(staged.ids)
        torch.cat(staged.aux, dim=1, out=into.aux)
        into.final.copy_(staged.final)
        # A CPU's kernel accumulates in float32 anyway, but widening its input first costs five times as much; so the
        # norm is rounded to the states' dtype here. One that leaves its range is measured again by the accumulator.
        into.norms.copy_(row_norms(into.aux, into.final, self._shape, None))


class DeviceCopier:
    """Copies from a GPU on a side stream, so that the next forward runs beside it.

    The rows are gathered on the device first. The engine's stream waits for that gathering alone, because the
    engine may overwrite its static buffers with the next forward; the copy to the host then has its own source.
    """

    def __init__(self, shape: RowShape, device: torch.device) -> None:
        self._shape = shape
        self._device = device
        self._side = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    @torch.no_grad()
    def stage(self, forward: Forward, batches: Sequence[Batch]) -> Sequence[StagedRows]:
        """Gather each batch's rows on the device, boundaries side by side."""
        main = torch.cuda.current_stream(self._device)
        self._side.wait_stream(main)
        try:
            with torch.cuda.stream(self._side):
                return [
                    StagedRows(
                        ids=forward.token_ids[batch.begin : batch.end].to(torch.int64, copy=True),
                        aux=(torch.cat([state[batch.begin : batch.end] for state in forward.boundaries], dim=1),),
                        final=forward.final[batch.begin : batch.end].clone(),
                    )
                    for batch in batches
                ]
        finally:  # also after an out-of-memory half way: earlier gathers still read the engine's tensors
            main.wait_event(self._side.record_event())

    @torch.no_grad()
    def copy(self, staged: StagedRows, into: Views) -> torch.cuda.Event:
        """Start the copies into the pinned slot; the staged tensors may be dropped, the side stream reuses them."""
        aux = staged.aux[0]
        with torch.cuda.stream(self._side):
            norms = row_norms(aux, staged.final, self._shape, torch.float32)
            into.ids.copy_(staged.ids, non_blocking=True)
            into.aux.copy_(aux, non_blocking=True)
            into.final.copy_(staged.final, non_blocking=True)
            into.norms.copy_(norms, non_blocking=True)
            # Blocking: a writer sleeps, it does not spin beside the scheduler.
            arrived = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
            arrived.record(self._side)
        return arrived


def row_norms(aux: torch.Tensor, final: torch.Tensor, shape: RowShape, dtype: torch.dtype | None) -> torch.Tensor:
    """Euclidean norms [n, k+1] of aux [n, k*D] per boundary, and of final [n, D], in `dtype` or the states' own.

    One reduction each, without a second pass for finiteness: a NaN or infinite value makes its row's norm so, and
    the exact count of such values is left to whoever sees a norm that is not finite.
    """
    states = aux.view(-1, shape.boundaries, shape.hidden_size)
    parts = [
        torch.linalg.vector_norm(states, dim=-1, dtype=dtype),
        torch.linalg.vector_norm(final, dim=-1, keepdim=True, dtype=dtype),
    ]
    return torch.cat(parts, dim=1)

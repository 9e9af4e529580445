"""Brings the rows of a forward from the engine's device into slots of the ring."""

from __future__ import annotations

import time
from typing import Protocol

import torch

from headrace.errors import UsageError
from headrace_capture.batching import Batch
from headrace_capture.forward import Forward
from headrace_capture.rows import Memory, Rows, RowShape, gather

_STAGES = 2  # one is gathered into while the other one is copied to the host


class Copier(Protocol):
    """Fills slots with batches of rows and their norms."""

    device_bytes: int

    def copy(self, forward: Forward, batch: Batch, into: Rows) -> torch.cuda.Event | None:
        """Fill rows of the ring; with an event, they are full when the event has happened.

        When this returns, the forward's tensors may be overwritten by work on the caller's current stream.
        """

    def enter_thread(self) -> None:
        """Called once by each thread that waits for events."""

    def idle(self, deadline: float) -> bool:
        """Whether every copy has ended, waiting until `deadline` (by `time.monotonic`)."""


class HostCopier:
    """Copies on the host: rows are full when `copy` returns, and nothing is allocated but their norms."""

    device_bytes = 0

    def copy(self, forward: Forward, batch: Batch, into: Rows) -> None:
        """Fill the rows and compute the norms."""
        gather(forward, batch, into)
        # A CPU's kernel accumulates in float32 anyway, but widening its input first costs five times as much; so the
        # norm is rounded to the states' dtype here. One that leaves its range is measured again by the accumulator.
        into.boundary_norms().copy_(torch.linalg.vector_norm(into.boundaries(), dim=-1))
        into.final_norms().copy_(torch.linalg.vector_norm(into.final(), dim=-1))

    def enter_thread(self) -> None:
        """Nothing to do."""

    def idle(self, deadline: float) -> bool:
        """Copies end before they return."""
        return True


class _Stage:
    """Device memory in which a batch is gathered, and what must have happened before the next one may be."""

    __slots__ = ("copied", "gathered", "memory")

    def __init__(self, memory: Memory) -> None:
        self.memory = memory
        self.gathered = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self.copied: torch.cuda.Event | None = None


class DeviceCopier:
    """Copies from a GPU beside the engine's work, through device memory of its own that is allocated once.

    A batch is gathered on the caller's stream, in order with the engine's work: the engine may overwrite static
    buffers or free the tensors right after. Norms and the copy to the host follow on a side stream, for which the
    engine's stream waits only when a batch needs a stage before the batch two before it has been copied. All copies
    are on that one stream, so a slot may be given to another batch while its copy is still under way.

    `max_rows` is the largest batch.

    Raises:
        UsageError: the device has too little memory left.
    """

    def __init__(self, shape: RowShape, device: torch.device, max_rows: int) -> None:
        self._device = device
        self._side = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        nbytes = shape.nbytes(max_rows)
        try:
            buffers = [torch.empty(nbytes, dtype=torch.uint8, device=device) for _ in range(_STAGES)]
        except torch.OutOfMemoryError as error:
            raise UsageError(
                f"{device} has no room for {_STAGES * nbytes} bytes of the capture's; lower "
                "HEADRACE_CAPTURE_BUFFER_BYTES, or leave more memory free in the server's settings"
            ) from error
        torch.cuda.synchronize(device)  # another stream may have used this memory before
        self._stages = [_Stage(Memory(shape, buffer)) for buffer in buffers]
        self._next = 0
        self.device_bytes = _STAGES * nbytes

    def copy(self, forward: Forward, batch: Batch, into: Rows) -> torch.cuda.Event:
        """Launch gathering, norms and the copy; waits for none of them."""
        main, side = torch.cuda.current_stream(self._device), self._side
        stage = self._stages[self._next]
        self._next = (self._next + 1) % _STAGES
        if stage.copied is not None:
            main.wait_event(stage.copied)
        rows = Rows(stage.memory, 0, batch.rows)
        gather(forward, batch, rows)
        stage.gathered.record(main)
        side.wait_event(stage.gathered)
        # Blocking: a writer sleeps, it does not spin beside the scheduler.
        arrived = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        with torch.cuda.stream(side):
            try:
                torch.linalg.vector_norm(rows.boundaries(), dim=-1, dtype=torch.float32, out=rows.boundary_norms())
                torch.linalg.vector_norm(rows.final(), dim=-1, dtype=torch.float32, out=rows.final_norms())
                into.raw().copy_(rows.raw(), non_blocking=True)
            finally:  # also after half of it: the stage may be read by what was launched
                arrived.record(side)
                stage.copied = arrived
        return arrived

    def enter_thread(self) -> None:
        """Make the device the thread's own: CUDA would open a context on device 0 otherwise."""
        torch.cuda.set_device(self._device)

    def idle(self, deadline: float) -> bool:
        """Whether the side stream has nothing left to do."""
        while not self._side.query():
            if time.monotonic() >= deadline:
                return False
            time.sleep(0.001)
        return True


def copier(shape: RowShape, device: torch.device, max_rows: int) -> Copier:
    """The copier for an engine's device."""
    return DeviceCopier(shape, device, max_rows) if device.type == "cuda" else HostCopier()


def try_copier(copier: Copier, shape: RowShape, memory: Memory, device: torch.device, max_rows: int) -> None:
    """Copy a few rows into `memory` and look at them, so that no forward is the first to load the device's kernels.

    Raises:
        UsageError: what arrives is not what was sent.
    """
    for count in {1, min(64, max_rows)}:
        ids = torch.arange(count, device=device)
        states = (torch.arange(count * shape.hidden_size, device=device) % 251 + 1).to(shape.dtype)
        states = states.view(count, shape.hidden_size)
        forward = Forward(
            pieces=(), token_ids=ids, boundaries=(states,) * shape.boundaries, final=states, weight_version=""
        )
        rows = Rows(memory, 0, count)
        with torch.no_grad():
            arrived = copier.copy(forward, Batch(begin=0, end=count, cuts=()), rows)
        if arrived is not None:
            arrived.synchronize()
        expected = states.cpu()
        norms = torch.linalg.vector_norm(expected.float(), dim=1, keepdim=True).expand(count, shape.boundaries + 1)
        if not (
            torch.equal(rows.ids(), ids.cpu())
            and torch.equal(rows.aux(), expected.repeat(1, shape.boundaries))
            and torch.equal(rows.final(), expected)
            and torch.allclose(rows.norms(0, count), norms, rtol=0.01)
        ):
            raise UsageError(
                f"states do not arrive whole from {device}; report this with the versions of torch and CUDA"
            )

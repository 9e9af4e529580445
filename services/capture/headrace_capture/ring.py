"""The host buffer between the forward and the writer threads: one allocation, handed out in slots."""

from __future__ import annotations

import mmap
import threading
import time
from collections import deque
from contextlib import suppress

import torch

from headrace.errors import UsageError

ALIGN = 64


class Slot:
    """Bytes [begin, end) of the ring, shared by `users` jobs; `begin` is a multiple of ALIGN."""

    __slots__ = ("begin", "end", "users")

    def __init__(self, begin: int, end: int, users: int) -> None:
        self.begin = begin
        self.end = end
        self.users = users


class Ring:
    """`capacity` bytes of host memory, handed out in order and taken back in any order.

    `tensor` is [capacity] uint8, `memory` the same bytes. With a `device` the memory is faulted in and registered
    with CUDA, so that copies from the device run beside the engine's work.

    Raises:
        UsageError: the memory cannot be had.
    """

    def __init__(self, capacity: int, *, device: torch.device | None = None) -> None:
        self.capacity = capacity
        try:
            block = mmap.mmap(-1, capacity, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except (OSError, ValueError, OverflowError) as error:
            raise UsageError(
                f"a capture buffer of {capacity} bytes cannot be had ({error}); lower HEADRACE_CAPTURE_BUFFER_BYTES"
            ) from error
        self.memory = memoryview(block)
        self.tensor = torch.frombuffer(block, dtype=torch.uint8)
        self._device = device
        if device is not None:
            with suppress(OSError):  # large pages are read faster; a kernel without them does as well
                block.madvise(mmap.MADV_HUGEPAGE)
            self.tensor.zero_()  # faults every page in
            register(self.tensor, device)
        self._slots: deque[Slot] = deque()
        self._freed = threading.Condition()
        self._releases = 0
        self._stalled = False

    @property
    def pinned_bytes(self) -> int:
        """Bytes that are registered with CUDA."""
        return 0 if self._device is None else self.capacity

    @property
    def in_use(self) -> int:
        """Bytes in slots that are not released."""
        with self._freed:
            return sum(slot.end - slot.begin for slot in self._slots if slot.users)

    def acquire(self, nbytes: int, users: int, deadline: float) -> Slot | None:
        """Take a slot for `users` jobs, waiting until `deadline` (by `time.monotonic`); None without room.

        After a wait in which not one job ended, nobody waits again before one does: a filesystem that hangs costs one
        wait, and not one a forward.
        """
        if nbytes > self.capacity:
            return None
        with self._freed:
            before, waited = self._releases, False
            while (begin := self._find(nbytes)) is None:
                left = deadline - time.monotonic()
                if left <= 0 or self._stalled:
                    self._stalled = self._stalled or (waited and self._releases == before)
                    return None
                self._freed.wait(left)
                waited = True
            slot = Slot(begin, begin + nbytes, users)
            self._slots.append(slot)
            return slot

    def release(self, slot: Slot, users: int = 1) -> None:
        """So many of the slot's jobs are done with it; the last one frees it."""
        with self._freed:
            self._releases += 1
            self._stalled = False
            slot.users -= users
            if slot.users:
                return
            while self._slots and not self._slots[0].users:
                self._slots.popleft()
            self._freed.notify_all()

    def close(self) -> None:
        """Undo the registration with CUDA; no copy may be under way."""
        if self._device is not None:
            device, self._device = self._device, None
            with torch.cuda.device(device):
                torch.cuda.cudart().cudaHostUnregister(self.tensor.data_ptr())  # type: ignore[no-untyped-call]

    def _find(self, nbytes: int) -> int | None:
        if not self._slots:
            return 0
        oldest = self._slots[0].begin
        head = -(-self._slots[-1].end // ALIGN) * ALIGN
        if self._slots[-1].begin >= oldest:  # free: [head, capacity) and [0, oldest)
            if head + nbytes <= self.capacity:
                return head
            return 0 if nbytes <= oldest else None
        return head if head + nbytes <= oldest else None


def register(tensor: torch.Tensor, device: torch.device) -> None:
    """Pin host memory for copies from `device`; raises UsageError, after which CUDA works on."""
    with torch.cuda.device(device):
        code = torch.cuda.cudart().cudaHostRegister(tensor.data_ptr(), tensor.numel(), 1)  # type: ignore[no-untyped-call]
        if int(code) == 0:
            return
        with suppress(RuntimeError):  # CUDA reports a call that failed once more, at the next launch: not the engine's
            torch.zeros(1, device=device)
    raise UsageError(
        f"CUDA cannot register a capture buffer of {tensor.numel()} bytes (error {int(code)}); raise the limit on "
        "locked memory or lower HEADRACE_CAPTURE_BUFFER_BYTES"
    )

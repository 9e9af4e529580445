"""The host buffer between the forward and the writer threads: one allocation, handed out in slots."""

from __future__ import annotations

import mmap
import threading
import time
from collections import deque

import torch

from headrace.errors import UsageError

_ALIGN = 64


class Slot:
    """A contiguous piece of the ring: `tensor` is [nbytes] uint8, `memory` the same bytes; shared by `users` jobs."""

    __slots__ = ("begin", "end", "memory", "tensor", "users")

    def __init__(self, begin: int, end: int, users: int, tensor: torch.Tensor, memory: memoryview) -> None:
        self.begin = begin
        self.end = end
        self.users = users
        self.tensor = tensor
        self.memory = memory


class Ring:
    """`capacity` bytes of host memory, handed out in order and taken back in any order.

    With `pinned` the memory is faulted in and registered with CUDA, so that copies from the device run beside it.

    Raises:
        UsageError: the memory cannot be had.
    """

    def __init__(self, capacity: int, *, pinned: bool = False) -> None:
        self.capacity = capacity
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | (mmap.MAP_POPULATE if pinned else 0)
        try:
            block = mmap.mmap(-1, capacity, flags=flags)
        except (OSError, ValueError, OverflowError) as error:
            raise UsageError(
                f"a capture buffer of {capacity} bytes cannot be had ({error}); lower HEADRACE_CAPTURE_BUFFER_BYTES"
            ) from error
        self._memory = memoryview(block)
        self._tensor = torch.frombuffer(block, dtype=torch.uint8)
        self._pinned = pinned
        if pinned:
            _register(self._tensor)
        self._slots: deque[Slot] = deque()
        self._freed = threading.Condition()

    @property
    def in_use(self) -> int:
        """Bytes in slots that are not released."""
        with self._freed:
            return sum(slot.end - slot.begin for slot in self._slots if slot.users)

    def acquire(self, nbytes: int, users: int, deadline: float) -> Slot | None:
        """Take a slot for `users` jobs, waiting until `deadline` (by `time.monotonic`); None without room."""
        if nbytes > self.capacity:
            return None
        with self._freed:
            while (begin := self._find(nbytes)) is None:
                left = deadline - time.monotonic()
                if left <= 0:
                    return None
                self._freed.wait(left)
            end = begin + nbytes
            slot = Slot(begin, end, users, self._tensor[begin:end], self._memory[begin:end])
            self._slots.append(slot)
            return slot

    def release(self, slot: Slot) -> None:
        """One of the slot's jobs is done with it; the last one frees it."""
        with self._freed:
            slot.users -= 1
            if slot.users:
                return
            while self._slots and not self._slots[0].users:
                self._slots.popleft()
            self._freed.notify_all()

    def close(self) -> None:
        """Undo the registration with CUDA; no copy may be under way."""
        if self._pinned:
            self._pinned = False
            torch.cuda.cudart().cudaHostUnregister(self._tensor.data_ptr())  # type: ignore[no-untyped-call]

    def _find(self, nbytes: int) -> int | None:
        if not self._slots:
            return 0
        oldest = self._slots[0].begin
        head = -(-self._slots[-1].end // _ALIGN) * _ALIGN
        if self._slots[-1].begin >= oldest:  # free: [head, capacity) and [0, oldest)
            if head + nbytes <= self.capacity:
                return head
            return 0 if nbytes <= oldest else None
        return head if head + nbytes <= oldest else None


def _register(tensor: torch.Tensor) -> None:
    code = torch.cuda.cudart().cudaHostRegister(tensor.data_ptr(), tensor.numel(), 0)  # type: ignore[no-untyped-call]
    if int(code) != 0:
        raise UsageError(
            f"CUDA cannot register a capture buffer of {tensor.numel()} bytes (error {int(code)}); raise the limit on "
            "locked memory or lower HEADRACE_CAPTURE_BUFFER_BYTES"
        )

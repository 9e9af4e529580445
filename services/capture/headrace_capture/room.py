"""How much of the dump folder's filesystem may still be promised, without asking it when a request comes."""

from __future__ import annotations

import threading
from collections.abc import Callable


class Room:
    """Bytes that open requests were promised, against what the filesystem had when it was last asked.

    `ask` may take as long as the filesystem likes; after the start it is called in `measure` alone, which is not for
    the scheduler's thread. Between two measurements what was written counts as gone, and what others removed is not
    yet there.

    Raises:
        OSError: the filesystem does not answer the first question.
    """

    def __init__(self, ask: Callable[[], int]) -> None:
        self._ask = ask
        self._lock = threading.Lock()
        self._asking = threading.Lock()
        self._free = ask()
        self._problem = ""
        self._promised = 0
        self._taken = 0  # bytes written so far, and when `_free` was asked for
        self._taken_then = 0
        self._measured = 0.0

    @property
    def problem(self) -> str:
        """Why the filesystem could not be asked, or an empty string."""
        return self._problem

    def measure(self, now: float, *, every: float = 0.0) -> None:
        """Ask the filesystem, unless it was asked within `every` seconds of `now` or another thread is asking."""
        if now - self._measured < every or not self._asking.acquire(blocking=False):
            return
        try:
            with self._lock:
                taken = self._taken  # before asking: what is written meanwhile may count twice, never not at all
            try:
                free, problem = self._ask(), ""
            except OSError as error:
                free, problem = 0, f"the dump folder: {error}"
            with self._lock:
                self._free, self._problem, self._taken_then, self._measured = free, problem, taken, now
        finally:
            self._asking.release()

    def promise(self, nbytes: int) -> str | None:
        """Promise room for a dump; the reason why there is none, or None when it is promised."""
        with self._lock:
            free = self._free - (self._taken - self._taken_then)
            if nbytes > free - self._promised:
                return f"the dump needs {nbytes} bytes, the folder has {free} and {self._promised} are promised"
            self._promised += nbytes
            return None

    def take(self, nbytes: int) -> None:
        """What was promised has been written."""
        with self._lock:
            self._promised -= nbytes
            self._taken += nbytes

    def give_back(self, nbytes: int) -> None:
        """What was promised is not needed any more."""
        with self._lock:
            self._promised -= nbytes

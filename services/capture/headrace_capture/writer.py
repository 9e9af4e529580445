"""A writer thread: takes jobs in order, outlives whatever a job raises, and can be waited for."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable

logger = logging.getLogger("headrace.capture")

Job = Callable[[], None]


class Writer:
    """One thread with its queue.

    A job is a callable; its `weight`, in bytes, says how much waits here. The queue is bounded by whoever puts:
    a job that holds a slot by the ring, others by `waiting`. `begin` is called in the thread before the first job.
    """

    def __init__(self, name: str, begin: Job) -> None:
        self._queue: queue.SimpleQueue[tuple[Job, int] | None] = queue.SimpleQueue()
        self._begin = begin
        self._state = threading.Condition()
        self._waiting = 0
        self._weight = 0
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    @property
    def load(self) -> tuple[int, int]:
        """Bytes and jobs that wait or run."""
        return self._weight, self._waiting

    @property
    def waiting(self) -> int:
        """Jobs that wait or run."""
        return self._waiting

    def put(self, job: Job, weight: int = 0) -> None:
        """Queue a job; never waits."""
        with self._state:
            self._waiting += 1
            self._weight += weight
        self._queue.put((job, weight))

    def wait_idle(self, deadline: float) -> bool:
        """Wait until no job waits or runs, or until `deadline` (by `time.monotonic`)."""
        with self._state:
            return self._state.wait_for(lambda: self._waiting == 0, max(0.0, deadline - time.monotonic()))

    def end(self) -> None:
        """End the thread after the jobs that wait."""
        self._queue.put(None)

    def join(self, deadline: float) -> bool:
        """Wait for the end of the thread; False when it did not come by `deadline`."""
        self._thread.join(max(0.0, deadline - time.monotonic()))
        return not self._thread.is_alive()

    def _run(self) -> None:
        self._do(self._begin)
        while (item := self._queue.get()) is not None:
            job, weight = item
            self._do(job)
            with self._state:
                self._waiting -= 1
                self._weight -= weight
                if not self._waiting:
                    self._state.notify_all()
            del job, item  # a job holds on to its request

    def _do(self, job: Job) -> None:
        try:
            job()
        except BaseException:  # jobs handle their errors; a dead writer would fill the buffer
            logger.exception("a capture job failed")

"""The thread that looks after a capture between its forwards: deadlines, room, the folder, statistics, the log."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress

from headrace.capturestats import CaptureStats, stats_file
from headrace.errors import UsageError
from headrace_capture.folder import Folder
from headrace_capture.room import Room

logger = logging.getLogger("headrace.capture")

_STATS_EVERY = 1.0  # seconds
_REPORT_EVERY = 5.0


class Upkeep:
    """Calls `expire` at each `interval` seconds, and keeps the rest up to date as far as the filesystem answers.

    `cards` are the files by which the engine declares itself, by name and in the order in which they appear: they are
    put into any folder that takes the place of the first. `report` logs what there is to tell.
    """

    def __init__(
        self,
        folder: Folder,
        room: Room,
        *,
        cards: Mapping[str, bytes],
        interval: float,
        expire: Callable[[], None],
        stats: Callable[[], CaptureStats],
        report: Callable[[], None],
    ) -> None:
        self._folder = folder
        self._room = room
        self._cards = cards
        self._interval = interval
        self._expire = expire
        self._stats = stats
        self._report = report
        self._written: CaptureStats | None = None
        self._stats_due = self._report_due = 0.0
        self._renewal = self._trouble = ""
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="headrace-capture-upkeep", daemon=True)
        self._thread.start()

    def stop(self, deadline: float) -> bool:
        """End the thread; False when it did not end by `deadline` (by `time.monotonic`)."""
        self._stopped.set()
        self._thread.join(max(0.0, deadline - time.monotonic()))
        return not self._thread.is_alive()

    def write_stats(self) -> None:
        """Write the statistics file, if they changed; without room for it, they are written another time."""
        stats = self._stats()
        if stats == self._written:
            return
        with suppress(OSError):
            self._folder.put(stats_file(stats.boot), stats.encode(), replace=True)
            self._written = stats

    def _run(self) -> None:
        while not self._stopped.wait(self._interval):
            try:
                self._tick(time.monotonic())
                self._trouble = ""
            except BaseException as error:  # without this thread, requests would stay half assembled for ever
                if self._trouble != repr(error):  # once, not at each interval
                    logger.exception("looking after the capture")
                self._trouble = repr(error)

    def _tick(self, now: float) -> None:
        self._expire()
        if now >= self._report_due:
            self._report_due = now + _REPORT_EVERY
            self._report()
        self._renew()
        self._folder.tidy()
        self._room.measure(now)
        if now >= self._stats_due:
            self._stats_due = now + _STATS_EVERY
            self.write_stats()

    def _renew(self) -> None:
        try:
            if not self._folder.renew():
                return
            for name, data in self._cards.items():
                self._folder.put(name, data, replace=True)
        except (OSError, UsageError) as error:
            if self._renewal != str(error):  # once, not at each interval
                logger.warning("another dump folder lies at %s and cannot be used: %s", self._folder.path, error)
            self._renewal = str(error)
        else:
            self._renewal, self._written = "", None
            logger.warning("another dump folder lies at %s; the engine goes on in it", self._folder.path)

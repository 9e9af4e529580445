"""Wakes the watcher when something appears in the dump folder; nothing depends on an event arriving."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path, PurePath

from watchfiles import Change, watch

from headrace import logs

log = logs.get(__name__)

# Milliseconds. Hidden files are written all the time: events are gathered for so long at most before one wakes us.
_STEP, _DEBOUNCE = 20, 40


@contextmanager
def watching(folder: Path, wake: threading.Event) -> Iterator[None]:
    """Set `wake` when a visible file appears or changes in the folder, from a thread, until the block ends."""
    stop = threading.Event()
    thread = threading.Thread(target=_watch, args=(folder, wake, stop), name="inotify", daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join(1.0)


def _watch(folder: Path, wake: threading.Event, stop: threading.Event) -> None:
    try:
        for _ in watch(
            folder,
            watch_filter=_matters,
            step=_STEP,
            debounce=_DEBOUNCE,
            stop_event=stop,
            recursive=False,
            raise_interrupt=False,
        ):
            wake.set()
    except (OSError, RuntimeError) as error:  # watchfiles' own error is a RuntimeError
        log.warning("no events from the dump folder; it is read at every rescan", folder=str(folder), error=str(error))


def _matters(change: Change, path: str) -> bool:
    return change is not Change.deleted and not PurePath(path).name.startswith(".")

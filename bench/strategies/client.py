"""What the three strategies share: posting a prompt, and reading the folder of dumps."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import requests

from bench.strategies.dumper import DONE, FOLDER_PREFIX, STATES

_PATIENCE, _PAUSE = 0.1, 0.02  # seconds; a dump is there before its answer, so that waiting can only bring another's
_TIMEOUT = 120.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Dump:
    """A finished dump: its number, folder, and count of rows."""

    number: int
    folder: Path
    rows: int


class Server:
    """A patched server and its dump folder, as a client sees them; threads may share it."""

    def __init__(self, url: str, dumps: Path) -> None:
        self._url = url
        self._dumps = dumps

    def prefill(self, prompt: Sequence[int]) -> None:
        """Have a prompt computed; returns with the answer, and raises requests.RequestException without one."""
        body = {"input_ids": list(prompt), "sampling_params": {"max_new_tokens": 0}}
        requests.post(f"{self._url}/generate", json=body, timeout=_TIMEOUT).raise_for_status()

    def finished(self) -> list[Dump]:
        """The dumps that are complete, by number."""
        found = []
        for folder in self._dumps.glob(f"{FOLDER_PREFIX}*"):
            try:
                rows = int((folder / DONE).read_text() or 0)
            except FileNotFoundError:  # still written, or taken by another thread
                continue
            found.append(Dump(number=int(folder.name.removeprefix(FOLDER_PREFIX)), folder=folder, rows=rows))
        return sorted(found, key=lambda dump: dump.number)

    def clear(self) -> None:
        """Remove the dumps that are complete."""
        for dump in self.finished():
            shutil.rmtree(dump.folder, ignore_errors=True)  # another thread clears, too

    def take(self, row: Path, choose: Callable[[Dump], bool]) -> bool:
        """Move the states of the first dump that is chosen to `row`; False when there is none for a little while."""
        end = time.monotonic() + _PATIENCE
        while True:
            for dump in filter(choose, self.finished()):
                try:
                    (dump.folder / STATES).rename(row)
                except FileNotFoundError:  # another thread was faster
                    continue
                shutil.rmtree(dump.folder, ignore_errors=True)
                return True
            if time.monotonic() > end:
                return False
            time.sleep(_PAUSE)


class Strategy(Protocol):
    """A way of pairing; one object a run, whose `extract` is called by several threads."""

    def __init__(self, server: Server) -> None:
        """Begin a run."""

    def extract(self, prompt: Sequence[int], row: Path) -> None:
        """Have a prompt computed, and put what is taken for its states at `row`, if anything is."""

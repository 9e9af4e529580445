"""Writes the normalised samples of a run under `inputs/` in its destination, whole or not at all."""

from __future__ import annotations

import fcntl
import os
import secrets
import shutil
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import IO, Self

from headrace.errors import UsageError
from headrace.manifest import INPUTS_FOLDER, SPEC_FILE
from headrace.publish import fsync_folder
from headrace.runs import RunSpec
from headrace_dispatcher.inputs import (
    INDEX_FILE,
    OFFSET,
    SAMPLES_FILE,
    RejectedSample,
    Sample,
    encode_entry,
)

TEMPORARY_PREFIX = f".{INPUTS_FOLDER}-"


class InputsWriter:
    """Writes `inputs/`, one entry an ordinal; nothing of it is seen before `publish`, nothing stays without it.

    A context manager. The file of samples is locked while it is written, so that what a killed process left can be
    told from what another process is writing now.
    """

    def __init__(self, output: Path) -> None:
        """Make `output` if need be; raises UsageError when it cannot be written."""
        self._output = output
        self._folder = output / f"{TEMPORARY_PREFIX}{secrets.token_hex(4)}"
        self._made = [folder for folder in (output, *output.parents) if not folder.exists()]
        self._published = False
        self._total = 0
        self._offset = 0
        try:
            output.mkdir(parents=True, exist_ok=True)
            self._folder.mkdir()
            self._samples: IO[bytes] = (self._folder / SAMPLES_FILE).open("xb")
            fcntl.flock(self._samples, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._index: IO[bytes] = (self._folder / INDEX_FILE).open("xb")
        except OSError as error:
            self._remove()
            raise _unwritable(output, error) from error

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for file in (self._samples, self._index):
            with suppress(OSError):  # a full disk again; what must last was flushed before it was published
                file.close()
        if not self._published:
            self._remove()

    def _remove(self) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)
        with suppress(OSError):  # somebody else uses one by now
            for folder in self._made:
                folder.rmdir()

    def add(self, entry: Sample | RejectedSample) -> None:
        """Append the entry of the next ordinal; raises UsageError when the disk is full."""
        if entry.ordinal != self._total:
            raise ValueError(f"entry of ordinal {entry.ordinal} in the place of {self._total}")
        line = encode_entry(entry)
        try:
            self._samples.write(line)
            self._index.write(OFFSET.pack(self._offset))
        except OSError as error:
            raise _unwritable(self._output, error) from error
        self._offset += len(line)
        self._total += 1

    def publish(self, spec: RunSpec) -> bool:
        """Make the folder last and visible as `inputs`; False when another process published first.

        Raises:
            UsageError: it cannot be written.
        """
        if spec.total != self._total:
            raise ValueError(f"a run of {spec.total} samples, but {self._total} entries")
        try:
            self._index.write(OFFSET.pack(self._offset))
            for file in (self._samples, self._index):
                file.flush()
                os.fsync(file.fileno())
            with (self._folder / SPEC_FILE).open("xb") as file:
                file.write(spec.encode() + b"\n")
                file.flush()
                os.fsync(file.fileno())
            fsync_folder(self._folder)
            try:
                # A folder that holds something is never replaced.
                self._folder.rename(self._output / INPUTS_FOLDER)
            except OSError:
                if (self._output / INPUTS_FOLDER / SPEC_FILE).exists():
                    return False
                raise
            self._published = True
            fsync_folder(self._output)
            with suppress(PermissionError):  # a parent may be entered and written but not read
                for folder in self._made:
                    fsync_folder(folder.parent)
        except OSError as error:
            raise _unwritable(self._output, error) from error
        return True


def remove_stale(output: Path) -> None:
    """Remove what killed processes left of unfinished inputs; what a living one holds stays."""
    for folder in output.glob(f"{TEMPORARY_PREFIX}*"):
        try:
            with (folder / SAMPLES_FILE).open("r+b") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
        except FileNotFoundError:
            shutil.rmtree(folder, ignore_errors=True)
        except OSError:  # locked, or not ours to remove
            continue


def _unwritable(output: Path, error: OSError) -> UsageError:
    return UsageError(f"{output} cannot be written: {error.strerror}; mend it or choose another output")

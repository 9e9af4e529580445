"""The capture core's settings, from the environment of the engine's process."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from headrace.errors import UsageError

DUMP_DIR = "HEADRACE_DUMP_DIR"
BUFFER_BYTES = "HEADRACE_CAPTURE_BUFFER_BYTES"
WRITERS = "HEADRACE_CAPTURE_WRITERS"
DEADLINE_SECONDS = "HEADRACE_CAPTURE_DEADLINE_SECONDS"
MAX_WAIT_SECONDS = "HEADRACE_CAPTURE_MAX_WAIT_SECONDS"

_FORWARDS = 4
_LEAST, _UNKNOWN, _MOST = 64 << 20, 2 << 30, 12 << 30  # bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class CaptureConfig:
    """How an engine captures.

    `dump_dir` is absolute. `buffer_bytes` is the host buffer between the forward and the writer threads; None makes it
    four of the engine's largest forwards (rows x (k + 1) x D x 2 bytes each): one that is computed, one that is
    launched behind it, one that is written, and one for what the cuts between requests leave unused. On a GPU a third
    of it is taken again in the device's memory. `deadline_seconds` is how long a half-prefilled request may stay
    without another part. `max_wait_seconds` is the longest that one forward may wait for room in the buffer.
    `remember` bounds the concluded ids whose late parts are recognised.

    Raises:
        UsageError: a value is out of range.
    """

    dump_dir: Path
    buffer_bytes: int | None = None
    writers: int = 4
    deadline_seconds: float = 120.0
    max_wait_seconds: float = 0.05
    remember: int = 16384

    def __post_init__(self) -> None:
        if not self.dump_dir.is_absolute():
            raise UsageError(f"{DUMP_DIR}={str(self.dump_dir)!r}: give an absolute path")
        if self.buffer_bytes is not None and self.buffer_bytes < 1:
            raise UsageError(f"{BUFFER_BYTES}={self.buffer_bytes}: give the size of about four forwards in bytes")
        if not 1 <= self.writers <= 64:
            raise UsageError(f"{WRITERS}={self.writers}: give 1 to 64 threads")
        if not 0 < self.deadline_seconds < float("inf"):
            raise UsageError(f"{DEADLINE_SECONDS}={self.deadline_seconds}: give a positive number of seconds")
        if not 0 <= self.max_wait_seconds <= 10:
            raise UsageError(f"{MAX_WAIT_SECONDS}={self.max_wait_seconds}: give 0 to 10 seconds")
        if self.remember < 1:
            raise UsageError(f"remember={self.remember}: at least one concluded id must be remembered")

    def buffer_for(self, row_bytes: int, forward_rows: int | None) -> int:
        """The buffer's bytes, for rows of `row_bytes` in an engine whose forwards have at most `forward_rows`."""
        if self.buffer_bytes is not None:
            return self.buffer_bytes
        if forward_rows is None:
            return _UNKNOWN
        return min(max(_FORWARDS * forward_rows * row_bytes, _LEAST), _MOST)

    @classmethod
    def from_environ(cls, environ: Mapping[str, str]) -> CaptureConfig | None:
        """Read the settings; None without HEADRACE_DUMP_DIR, and then nothing may be captured.

        Raises:
            UsageError: a variable does not parse or is out of range.
        """
        folder = environ.get(DUMP_DIR, "")
        if not folder:
            return None
        given: dict[str, int | float] = {}
        for name, variable, kind in _VARIABLES:
            text = environ.get(variable, "")
            if text:
                given[name] = _number(variable, text, kind)
        return cls(dump_dir=Path(folder), **given)  # type: ignore[arg-type]


_VARIABLES: tuple[tuple[str, str, type[int] | type[float]], ...] = (
    ("buffer_bytes", BUFFER_BYTES, int),
    ("writers", WRITERS, int),
    ("deadline_seconds", DEADLINE_SECONDS, float),
    ("max_wait_seconds", MAX_WAIT_SECONDS, float),
)


def _number(variable: str, text: str, kind: type[int] | type[float]) -> int | float:
    try:
        return kind(text)
    except ValueError:
        raise UsageError(f"{variable}={text!r} is not a number") from None

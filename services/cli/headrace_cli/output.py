"""Standard output and error as a command has them: what they cannot spell or take is no traceback."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from io import TextIOWrapper
from typing import NoReturn

from headrace.errors import Unavailable

# What a shell says of a program that SIGPIPE ended, as it would this one did Python not ignore that signal.
_NOBODY_READS = 141


class _Output(TextIOWrapper):
    """A stream that asks nothing of its encoding, and whose end is an end of the command."""

    def __init__(self, stream: TextIOWrapper) -> None:
        """Take the place of `stream`, which cannot be used any more."""
        ways = {"line_buffering": stream.line_buffering, "write_through": stream.write_through}
        encoding = stream.encoding
        super().__init__(stream.detach(), encoding=encoding, errors="replace", newline=None, **ways)

    def write(self, text: str, /) -> int:
        with self._lost():
            return super().write(text)

    def flush(self) -> None:
        with self._lost():
            super().flush()

    @contextmanager
    def _lost(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            # What is still buffered is written once more at the end, and must be taken then.
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self.fileno())
            os.close(nowhere)
            self._end(error)

    def _end(self, error: OSError) -> None:
        """Nothing: of the errors' stream there is nowhere to say so."""


class _Answers(_Output):
    """Standard output: who asked gets no answer, so the command ends."""

    def _end(self, error: OSError) -> NoReturn:
        if isinstance(error, BrokenPipeError):
            sys.exit(_NOBODY_READS)
        raise Unavailable(f"standard output takes no more: {error.strerror}; make room, or write elsewhere") from error


def take_over() -> None:
    """Put these in the place of `sys.stdout` and `sys.stderr`; a closed one stays closed."""
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout = _Answers(sys.stdout)
    if isinstance(sys.stderr, TextIOWrapper):
        sys.stderr = _Output(sys.stderr)

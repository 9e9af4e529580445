"""The console script `headrace`."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from types import FrameType

from headrace.errors import HeadraceError
from headrace.extras import needs_extra

_INTERRUPTED = 130  # what a shell says of a program that SIGINT ended


def run() -> None:
    """Run a command; errors are one line on stderr and an exit code of their own, Ctrl-C is a code alone."""
    # Ctrl-C is how one ends watching.
    code = 0 if "--watch" in sys.argv else _INTERRUPTED
    # While modules are imported there is nothing to leave behind, and Python throws some exceptions away then.
    _on_interrupt(lambda: os._exit(code))
    with needs_extra("cli"):
        from headrace_cli.commands import app
        from headrace_cli.console import one_line
        from headrace_cli.output import take_over
    take_over()
    try:
        _on_interrupt(lambda: sys.exit(code))
        app()
    except HeadraceError as error:
        if sys.stderr is not None:
            sys.stderr.write(f"headrace: {one_line(str(error))}\n")
        sys.exit(error.exit_code)
    finally:
        _on_interrupt(lambda: os._exit(code))


def _on_interrupt(end: Callable[[], object]) -> None:
    """Have Ctrl-C call `end`, unless whoever started this had it ignored."""

    def handle(number: int, frame: FrameType | None) -> None:
        end()

    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, handle)

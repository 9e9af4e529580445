"""The console script `headrace`."""

from __future__ import annotations

import sys

from headrace.errors import HeadraceError
from headrace.extras import needs_extra


def run() -> None:
    """Run a command; errors are one line on stderr and an exit code of their own."""
    with needs_extra("cli"):
        from headrace_cli.commands import app
        from headrace_cli.console import printable
    try:
        app()
    except HeadraceError as error:
        sys.stderr.write(f"headrace: {printable(str(error))}\n")
        sys.exit(error.exit_code)

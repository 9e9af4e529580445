"""The console scripts as a user runs them."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

CLI = "from headrace_cli.main import run; run()"


def headrace(
    *arguments: str | Path, script: str = "cli", timeout: float = 60.0, **environ: str
) -> subprocess.CompletedProcess[str]:
    """Run a console script, as a user does."""
    code = f"from headrace_{script}.main import run; run()"
    clean = {name: value for name, value in os.environ.items() if not name.startswith("HEADRACE_")}
    return subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)],
        env={**clean, **environ},
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )


def assert_one_line(result: subprocess.CompletedProcess[str], code: int, *words: str) -> None:
    """Exit code, one line on stderr, the words in it, no traceback."""
    assert result.returncode == code, result
    last = result.stderr.strip().splitlines()
    assert len(last) == 1, result.stderr
    for word in words:
        assert word in last[0], last[0]


@contextmanager
def started(
    *arguments: str, code: str = CLI, stdout: int | IO[bytes] = subprocess.PIPE, **environ: str
) -> Iterator[subprocess.Popen[bytes]]:
    """A `headrace` that runs, until the end of the block at the latest; `code` is how it is started."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("HEADRACE_")}
    process = subprocess.Popen(
        [sys.executable, "-c", code, *arguments],
        env={**clean, **environ},
        stdin=subprocess.DEVNULL,
        stdout=stdout,
        stderr=subprocess.PIPE,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate(timeout=20)


def end_of(process: subprocess.Popen[bytes]) -> tuple[int, str]:
    """Exit code and stderr."""
    _, complaints = process.communicate(timeout=30)
    return process.returncode, complaints.decode()

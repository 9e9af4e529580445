"""The console scripts as a user runs them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path


def headrace(*arguments: str | Path, script: str = "cli", **environ: str) -> subprocess.CompletedProcess[str]:
    """Run a console script, as a user does."""
    code = f"from headrace_{script}.main import run; run()"
    clean = {name: value for name, value in os.environ.items() if not name.startswith("HEADRACE_")}
    return subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)],
        env={**clean, **environ},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def assert_one_line(result: subprocess.CompletedProcess[str], code: int, *words: str) -> None:
    """Exit code, one line on stderr, the words in it, no traceback."""
    assert result.returncode == code, result
    last = result.stderr.strip().splitlines()
    assert len(last) == 1, result.stderr
    for word in words:
        assert word in last[0], last[0]

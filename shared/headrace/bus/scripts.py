"""The Lua scripts: files beside this one, `common.lua` before each, called by name."""

from __future__ import annotations

from functools import cache
from importlib.resources import files
from typing import Any

import redis


@cache
def source(name: str) -> str:
    """The text of `lua/{name}.lua` with `lua/common.lua` before it."""
    folder = files("headrace.bus") / "lua"
    return (folder / "common.lua").read_text() + "\n" + (folder / f"{name}.lua").read_text()


class Scripts:
    """Calls scripts on one server; a server that lost them is given them again by redis-py."""

    def __init__(self, client: redis.Redis) -> None:
        """Use this client."""
        self._client = client
        self._known: dict[str, Any] = {}

    def __call__(self, name: str, *arguments: str | int | float | bytes) -> Any:
        """Run `lua/{name}.lua` with these ARGV."""
        script = self._known.get(name)
        if script is None:
            script = self._known[name] = self._client.register_script(source(name))
        return script(args=arguments)

"""Which registered site is an engine's: by its address, whichever name of it was given."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterable
from typing import Protocol, TypeVar
from urllib.parse import urlsplit

_PORTS = {"http": 80, "https": 443}
_RESOLVE_SECONDS = 10.0  # in all; a name server that is away takes long for each name


class _Located(Protocol):
    @property
    def url(self) -> str: ...


_T = TypeVar("_T", bound=_Located)
Resolve = Callable[[str], frozenset[str]]


def at_url(places: Iterable[_T], url: str, resolve: Resolve | None = None) -> list[_T]:
    """Those of the sites whose engine is at `url`: of the same address, or else of one that is the same machine's port.

    `resolve` gives the addresses of a host's name.
    """
    known = list(places)
    same = [place for place in known if _parts(place.url) == _parts(url)]
    if same:
        return same
    host, *rest = _parts(url)
    addresses = resolve or _Resolver()
    mine = addresses(str(host))
    return [
        place for place in known if _parts(place.url)[1:] == tuple(rest) and mine & addresses(str(_parts(place.url)[0]))
    ]


def _parts(url: str) -> tuple[str, int, str]:
    """Host, port and path."""
    parts = urlsplit(url)
    return parts.hostname or "", parts.port or _PORTS.get(parts.scheme, 0), parts.path.rstrip("/")


class _Resolver:
    """Asks the system for addresses, and no more once that took too long."""

    def __init__(self) -> None:
        self._until = time.monotonic() + _RESOLVE_SECONDS
        self._known: dict[str, frozenset[str]] = {}

    def __call__(self, host: str) -> frozenset[str]:
        if host not in self._known and time.monotonic() < self._until:
            try:
                found = frozenset(str(entry[4][0]) for entry in socket.getaddrinfo(host, None))
            except (OSError, UnicodeError):
                found = frozenset()
            self._known[host] = found
        return self._known.get(host, frozenset())

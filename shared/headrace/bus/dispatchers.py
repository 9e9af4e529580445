"""Dispatchers on the bus: a sign of life under a TTL."""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace.bus import keys

if TYPE_CHECKING:
    from headrace.bus import Bus


class Dispatchers:
    """Which dispatchers live; nothing depends on it but what people are told."""

    def __init__(self, bus: Bus) -> None:
        """Work over this bus."""
        self._bus = bus

    def beat(self, name: str, ttl: float) -> None:
        """This dispatcher lives, and says so again within `ttl` seconds."""
        with self._bus.guard():
            self._bus.redis.set(keys.dispatcher(name), 1, px=round(ttl * 1000))

    def leave(self, name: str) -> None:
        """This dispatcher ends."""
        with self._bus.guard():
            self._bus.redis.delete(keys.dispatcher(name))

    def alive(self) -> int:
        """How many dispatchers live. Scans the key space: for people who ask, not for loops."""
        with self._bus.guard():
            return sum(1 for _ in self._bus.redis.scan_iter(keys.dispatcher("*"), count=1000))

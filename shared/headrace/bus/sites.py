"""Sites on the bus: registrations under a TTL, and eviction."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import orjson

from headrace.bus import keys
from headrace.bus.client import text
from headrace.bus.values import Site, Unregistered
from headrace.errors import Unreadable
from headrace.flow import Load
from headrace.tensorfile import ITEM_SIZE

if TYPE_CHECKING:
    from headrace.bus import Bus


class Sites:
    """What concerns dump folders and their engines."""

    def __init__(self, bus: Bus) -> None:
        """Work over this bus."""
        self._bus = bus

    def register(self, site: Site, ttl: float) -> None:
        """Register, or renew, for `ttl` seconds, with the folder's size as measured just now."""
        fields: list[str | int | bytes] = []
        for name, value in asdict(site).items():
            fields += (name, orjson.dumps(value) if isinstance(value, tuple | bool) else value)
        self._bus.call("register", site.site, round(ttl * 1000), *fields)

    def unregister(self, site: str) -> None:
        """No more requests for this engine; what was captured there is still stored."""
        with self._bus.guard():
            self._bus.redis.delete(keys.site(site), keys.unregistered(site))

    def explain(self, entry: Unregistered, ttl: float) -> None:
        """Say for `ttl` seconds why a site is not registered; registering it ends that."""
        with self._bus.guard():
            self._bus.redis.set(keys.unregistered(entry.site), orjson.dumps(asdict(entry)), px=round(ttl * 1000))

    def unregistered(self) -> list[Unregistered]:
        """Sites whose watchers say why they do not register. Scans the key space: for people who ask, not for loops."""
        with self._bus.guard():
            names = sorted(self._bus.redis.scan_iter(keys.unregistered("*"), count=1000))
            values: Any = self._bus.redis.mget(names) if names else []
        found = []
        for value in values:
            with suppress(ValueError, TypeError):  # one of another version
                found.append(Unregistered(**orjson.loads(value or b"")))
        return found

    def names(self) -> list[str]:
        """Ids of all sites that are known, registered or not."""
        with self._bus.guard():
            return sorted(text(name) for name in self._bus.redis.smembers(keys.SITES))

    def get(self, name: str) -> Site | None:
        """The registration; None when it lapsed.

        Raises:
            Unreadable: another version's watcher wrote it.
        """
        with self._bus.guard():
            reply: Any = self._bus.redis.hgetall(keys.site(name))
        if b"site" not in reply:
            return None
        try:
            return _site({key.decode(): value for key, value in reply.items()})
        except (KeyError, ValueError, TypeError) as error:
            raise Unreadable(
                f"the registration of site {name} cannot be read ({type(error).__name__}: {str(error)[:200]}); "
                "its watcher is of another version than this one: upgrade both to the same"
            ) from error

    def registered(self) -> list[Site]:
        """All sites that take requests now; one whose registration cannot be read takes none."""
        found = []
        for name in self.names():
            with suppress(Unreadable):
                found.append(self.get(name))
        return [site for site in found if site is not None]

    def load(self, site: Site) -> Load:
        """What the site carries now."""
        with self._bus.guard():
            records = self._bus.redis.hvals(keys.credits(site.site))
        held = [tuple(map(int, record.split())) for record in records]
        return Load(
            requests=len(held),
            tokens=sum(tokens for tokens, _, _ in held),
            promised_bytes=sum(nbytes for _, nbytes, _ in held),
            measured_bytes=site.dump_bytes,
        )

    def storing(self, name: str) -> tuple[int, int]:
        """How many requests are captured and not stored, and how many storage jobs are queued."""
        with self._bus.guard():
            captured = self._bus.redis.zcard(keys.captured(name))
        return int(captured), self._bus.jobs.depth(name)

    def evict(self, name: str) -> bool:
        """Forget a site whose registration lapsed and that holds no request any more, with its queue."""
        if not self._bus.call("evict", name):
            return False
        self._bus.jobs.delete_queue(name)
        return True


def _site(table: dict[str, bytes]) -> Site:
    site = Site(
        site=table["site"].decode(),
        url=table["url"].decode(),
        boot=table["boot"].decode(),
        incarnation=table["incarnation"].decode(),
        model=table["model"].decode(),
        boundaries=tuple(orjson.loads(table["boundaries"])),
        final_state=table["final_state"].decode(),
        hidden_size=int(table["hidden_size"]),
        dtype=table["dtype"].decode(),
        fingerprint=table["fingerprint"].decode(),
        weight_version=table["weight_version"].decode(),
        # Watchers of the first version do not know of it.
        final_norm=orjson.loads(table.get("final_norm", b"false")),
        context_length=int(table["context_length"]),
        max_requests=int(table["max_requests"]),
        max_tokens=int(table["max_tokens"]),
        dump_cap_bytes=int(table["dump_cap_bytes"]),
        dump_bytes=int(table["dump_bytes"]),
    )
    if site.dtype not in ITEM_SIZE or site.dump_cap_bytes < 1:
        raise ValueError(f"dtype {site.dtype!r}, a cap of {site.dump_cap_bytes} bytes")
    return site

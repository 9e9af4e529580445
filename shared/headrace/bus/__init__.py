"""The one module that talks to Redis: runs, requests, sites and storage jobs."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import redis

from headrace.bus.client import connect, redact, translated
from headrace.bus.dispatchers import Dispatchers
from headrace.bus.jobs import Jobs
from headrace.bus.requests import Requests
from headrace.bus.runs import Runs
from headrace.bus.scripts import Scripts
from headrace.bus.sites import Sites
from headrace.bus.values import Leases, ServerFacts
from headrace.bus.waiting import until_redis_answers
from headrace.settings import Settings

if TYPE_CHECKING:
    from headrace.service import Service

__all__ = ["Bus"]


class Bus:
    """A connection to the shared store; thread-safe."""

    def __init__(self, client: redis.Redis, *, where: str = "redis", leases: Leases | None = None) -> None:
        """Use this client; `where` names the server in messages."""
        self.redis = client
        self.where = where
        self._scripts = Scripts(client)
        self.runs = Runs(self)
        self.requests = Requests(self, leases or Leases())
        self.sites = Sites(self)
        self.jobs = Jobs(self)
        self.dispatchers = Dispatchers(self)

    @classmethod
    def open(cls, url: str, password: str = "", *, leases: Leases | None = None) -> Bus:
        """Connect, and ask the server for a sign of life.

        Raises:
            UsageError: the URL or the password is wrong.
            RedisAway: nothing answers there.
        """
        bus = cls(connect(url, password), where=redact(url), leases=leases)
        bus.ping()
        return bus

    @classmethod
    def from_settings(cls, settings: Settings) -> Bus:
        """Open the server that the settings name, with their leases; raises as `open`."""
        leases = Leases(
            in_flight=settings.lease_in_flight_seconds,
            grace=settings.lease_grace_seconds,
            captured=settings.lease_captured_seconds,
            storing=settings.lease_storing_seconds,
            record=settings.lease_record_seconds,
        )
        return cls.open(settings.redis_url, settings.redis_password.get_secret_value(), leases=leases)

    @classmethod
    def wait_for(cls, service: Service) -> Bus | None:
        """Open the server of a service's settings as soon as it answers; None when the service is stopped before.

        Raises:
            UsageError: the URL or the password is wrong.
        """
        return until_redis_answers(service, lambda: cls.from_settings(service.settings))

    def ping(self) -> None:
        """Raise RedisAway or UsageError unless the server answers."""
        with self.guard():
            self.redis.ping()

    def server_clock(self) -> tuple[str, float]:
        """The id of this life of the server, which changes when it restarts, and its clock in seconds."""
        with self.guard():
            seconds, microseconds = self.redis.time()
            return str(self.redis.info("server")["run_id"]), seconds + microseconds / 1e6

    def server_facts(self) -> ServerFacts:
        """What the server says of itself."""
        with self.guard():
            server, memory = self.redis.info("server"), self.redis.info("memory")
            persistent = bool(self.redis.info("persistence").get("aof_enabled"))
        return ServerFacts(
            version=str(server["redis_version"]),
            policy=str(memory.get("maxmemory_policy", "unknown")),
            persistent=persistent,
            used_bytes=int(memory.get("used_memory", 0)),
            max_bytes=int(memory.get("maxmemory", 0)),
        )

    def call(self, script: str, *arguments: str | int | float | bytes) -> Any:
        """Run a script."""
        with self.guard():
            return self._scripts(script, *arguments)

    def guard(self) -> AbstractContextManager[None]:
        """Translate what redis-py raises inside the block."""
        return translated(self.where)

    def close(self) -> None:
        """Close the pool."""
        self.redis.close()

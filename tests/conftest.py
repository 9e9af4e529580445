"""Fixtures that every tier shares: a real server, and a bus over it."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings

from headrace.bus import Bus
from headrace.bus.values import Leases
from tests.support.server import ValkeyServer

settings.register_profile("headrace", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("ci", parent=settings.get_profile("headrace"), derandomize=True)
settings.load_profile("ci" if os.environ.get("CI") else "headrace")

SHORT = Leases(in_flight=5.0, grace=2.0, captured=5.0, storing=5.0, record=5.0)


@pytest.fixture(autouse=True)
def _no_settings_of_the_caller(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("HEADRACE_")]:
        monkeypatch.delenv(name)


@pytest.fixture(scope="session")
def redis_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A server of this worker's own, for the whole session; tests empty it."""
    with ValkeyServer(tmp_path_factory.mktemp("redis")) as server:
        yield server.url


@pytest.fixture
def bus(redis_url: str) -> Iterator[Bus]:
    """A bus with short leases over an empty server."""
    opened = Bus.open(redis_url, leases=SHORT)
    opened.redis.flushall()
    yield opened
    opened.close()

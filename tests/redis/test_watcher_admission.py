"""Which engines a watcher registers, and when it takes the registration back."""

from __future__ import annotations

from pathlib import Path

import pytest

from headrace.bus import Bus
from headrace.dumps import ENGINE_FILE
from headrace.ids import RequestId
from tests.support.server import free_port
from tests.support.waiting import wait_until
from tests.support.watched import StubEngine, WatcherProcess, lose, publish, ready, registered

pytestmark = pytest.mark.redis


def test_a_folder_without_an_engine_is_watched_and_not_registered(
    bus: Bus, redis_url: str, dumps: Path, tmp_path: Path, engine: StubEngine
) -> None:
    port = free_port()
    with WatcherProcess(dumps, tmp_path, redis_url, engine.url, health_port=port) as watcher:
        wait_until(lambda: "redis" not in ready(port)[1] and ready(port)[0] == 503, what="Redis to be ready")
        assert "engine: no engine has started" in ready(port)[1]
        engine.health = 503
        engine.boot()
        wait_until(lambda: "/health says 503" in ready(port)[1], what="the health check")
        engine.health = 200
        wait_until(lambda: ready(port) == (200, "ready\n"), what="readiness")
        assert bus.sites.registered()
        assert watcher.stop() == 0


def test_an_engine_whose_canary_never_comes_is_not_registered_and_says_what_to_check(
    bus: Bus, redis_url: str, dumps: Path, tmp_path: Path, engine: StubEngine
) -> None:
    engine.on_canary = lambda request, ids: None
    engine.boot()
    port = free_port()
    with WatcherProcess(
        dumps, tmp_path, redis_url, engine.url, canary_timeout_seconds=0.2, health_port=port
    ) as watcher:
        watcher.wait_for("plugin installed")
        assert bus.sites.registered() == []
        assert ready(port)[0] == 503
        assert "canary: the engine answered" in ready(port)[1]
        engine.on_canary = engine.capture
        registered(bus)
        assert len(engine.canaries) > 1
        assert len(set(engine.canaries)) == len(engine.canaries)


@pytest.mark.parametrize(
    ("reason", "advice"), [("prefix_cached", "--disable-radix-cache"), ("no_room", "more room"), ("odd", "odd")]
)
def test_a_canary_that_the_plugin_lost_is_not_registered(
    bus: Bus, redis_url: str, dumps: Path, tmp_path: Path, engine: StubEngine, reason: str, advice: str
) -> None:
    engine.on_canary = lambda request, ids: lose(dumps, request, reason)
    engine.boot()
    with WatcherProcess(dumps, tmp_path, redis_url, engine.url) as watcher:
        watcher.wait_for(advice)
        assert bus.sites.registered() == []
        wait_until(lambda: not list(dumps.glob("hr-*")), what="the notice to go")


def test_a_canary_that_does_not_match_is_not_registered(
    bus: Bus, redis_url: str, dumps: Path, tmp_path: Path, engine: StubEngine
) -> None:
    engine.on_canary = lambda request, ids: publish(dumps, request, ids, boundaries=(1, 2, 3))
    engine.boot()
    with WatcherProcess(dumps, tmp_path, redis_url, engine.url) as watcher:
        watcher.wait_for("the canary failed: layers")
        assert bus.sites.registered() == []


def test_canaries_of_others_are_removed_and_prove_nothing(
    bus: Bus, redis_url: str, dumps: Path, tmp_path: Path, engine: StubEngine
) -> None:
    ids = list(range(1, 13))
    old = RequestId.make("canary", 0, "oldoldol", ids)
    publish(dumps, old, ids)
    lose(dumps, old, "evicted")
    with WatcherProcess(dumps, tmp_path, redis_url, engine.url) as watcher:
        wait_until(lambda: not list(dumps.glob("hr-canary-*")), what="the old canary to go")
        assert bus.sites.registered() == []
        assert watcher.stop() == 0


def test_another_boot_of_the_engine_is_proven_anew(
    bus: Bus, redis_url: str, dumps: Path, tmp_path: Path, engine: StubEngine
) -> None:
    engine.boot()
    with WatcherProcess(dumps, tmp_path, redis_url, engine.url) as watcher:
        assert registered(bus).boot == "bootbootboot"
        engine.on_canary = lambda request, ids: None
        engine.boot(boot="secondboot22")
        wait_until(lambda: not bus.sites.registered(), what="the old boot to be unregistered")
        wait_until(lambda: len(engine.canaries) == 2, what="the second canary")
        publish(dumps, engine.canaries[-1], [1] * 12)
        watcher.wait_for("token_content")
        engine.on_canary = engine.capture
        assert registered(bus).boot == "secondboot22"


def test_an_engine_that_stops_answering_or_leaves_is_unregistered(
    bus: Bus, redis_url: str, dumps: Path, tmp_path: Path, engine: StubEngine
) -> None:
    engine.boot()
    with WatcherProcess(dumps, tmp_path, redis_url, engine.url):
        registered(bus)
        engine.health = 503
        wait_until(lambda: not bus.sites.registered(), what="the engine to be unregistered")
        engine.health = 200
        registered(bus)
        assert len(engine.canaries) == 2
        (dumps / ENGINE_FILE).unlink()
        wait_until(lambda: not bus.sites.registered(), what="the engine to be unregistered")

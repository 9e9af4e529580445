"""Which engines a watcher registers, and when it takes the registration back."""

from __future__ import annotations

from pathlib import Path

import pytest

from headrace.bus import Bus, keys
from headrace.dumps import ENGINE_FILE, PROBLEM_FILE, EngineProblem, encode_json
from headrace.ids import RequestId
from tests.support.server import free_port
from tests.support.waiting import wait_until
from tests.support.watched import StubEngine, WatcherProcess, lose, publish, put, ready, registered

pytestmark = pytest.mark.redis


def test_a_folder_without_an_engine_is_watched_and_not_registered(
    bus: Bus, redis_url: str, dumps: Path, tmp_path: Path, engine: StubEngine
) -> None:
    port = free_port()
    with WatcherProcess(dumps, tmp_path, redis_url, engine.url, health_port=port) as watcher:
        wait_until(lambda: "engine: no engine has started" in ready(port)[1], what="the first round")
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


def test_an_engine_that_says_why_it_captures_nothing_is_quoted_until_another_boot_does(
    bus: Bus, redis_url: str, dumps: Path, tmp_path: Path, engine: StubEngine
) -> None:
    port = free_port()
    problem = EngineProblem(boot="bootbootboot", problem="Scheduler.run_batch has no parameter batch: upgrade")
    put(dumps / PROBLEM_FILE, encode_json(problem))
    with WatcherProcess(dumps, tmp_path, redis_url, engine.url, health_port=port) as watcher:
        watcher.wait_for("Scheduler.run_batch has no parameter batch")
        wait_until(lambda: "engine: the engine captures nothing: Sched" in ready(port)[1], what="readiness to say so")
        (entry,) = wait_until(bus.sites.unregistered, what="the reason in Redis")
        assert entry.url == engine.url
        assert entry.why == f"the engine captures nothing: {problem.problem}"
        assert "is not a dump" not in watcher.text()
        put(dumps / PROBLEM_FILE, b"not JSON")
        watcher.wait_for("why cannot be read")
        (dumps / PROBLEM_FILE).unlink()
        wait_until(lambda: "engine: no engine has started" in ready(port)[1], what="the notice to be gone")
        put(dumps / PROBLEM_FILE, encode_json(problem))
        engine.boot()
        site = registered(bus)
        assert site.site == entry.site
        assert bus.sites.unregistered() == [], "a card counts for more than a notice beside it"
        assert watcher.stop() == 0


def test_why_a_site_is_not_registered_is_in_redis_while_its_watcher_lives(
    bus: Bus, redis_url: str, dumps: Path, tmp_path: Path, engine: StubEngine
) -> None:
    engine.on_canary = lambda request, ids: lose(dumps, request, "prefix_cached")

    def why(word: str) -> None:
        def said() -> bool:
            return any(word in entry.why for entry in bus.sites.unregistered())

        wait_until(said, what=f"{word!r} in Redis")

    with WatcherProcess(dumps, tmp_path, redis_url, engine.url) as watcher:
        why("no engine has started")
        engine.health = 503
        engine.boot()
        why("/health says 503")
        engine.health = 200
        why("--disable-radix-cache")
        assert 0 < bus.redis.pttl(keys.unregistered(bus.sites.unregistered()[0].site)) <= 30_000
        engine.on_canary = engine.capture
        registered(bus)
        assert bus.sites.unregistered() == []
        engine.on_canary = lambda request, ids: lose(dumps, request, "prefix_cached")
        engine.boot(boot="secondboot22")
        why("--disable-radix-cache")
        assert watcher.stop() == 0
    assert bus.sites.unregistered() == []
    assert bus.sites.registered() == []

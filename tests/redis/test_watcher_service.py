from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

import pytest

from headrace.bus import Bus
from headrace.bus.values import Leases
from headrace.dumps import SITE_FILE
from headrace.finalnorm import norm_file
from tests.support.dumps import BARE_ENGINE
from tests.support.server import ValkeyServer, free_port
from tests.support.stores import RUN, make_sample
from tests.support.waiting import wait_until
from tests.support.watched import BOOT, StubEngine, WatcherProcess, claim, lose, publish, ready, registered, start_run

pytestmark = pytest.mark.redis


def test_an_engine_is_registered_after_its_canary_and_unregistered_at_the_end(
    bus: Bus, redis_url: str, dumps: Path, tmp_path: Path, engine: StubEngine
) -> None:
    engine.boot(norm_file=norm_file(BOOT))
    with WatcherProcess(dumps, tmp_path, redis_url, engine.url, max_requests=7, dump_cap_bytes=1 << 40) as watcher:
        site = registered(bus)
        assert site.site == (dumps / SITE_FILE).read_text().strip()
        assert (site.url, site.boundaries, site.final_state) == (engine.url, (2, 4, 6), "pre_norm")
        assert site.final_norm
        assert (site.context_length, site.max_requests) == (1000, 7)
        assert 0 < site.dump_cap_bytes < 1 << 40
        assert len(engine.canaries) == 1
        wait_until(lambda: not list(dumps.glob("hr-canary-*")), what="the canary's dump to go")
        assert watcher.stop() == 0
    assert bus.sites.registered() == []
    assert "unclosed" not in watcher.text()


def test_a_norm_that_the_engine_does_not_put_into_its_fingerprint_is_none(
    bus: Bus, redis_url: str, dumps: Path, tmp_path: Path, engine: StubEngine
) -> None:
    engine.on_canary = lambda request, ids: publish(dumps, request, ids, engine=BARE_ENGINE)
    engine.boot(fingerprint=BARE_ENGINE, norm_file=norm_file(BOOT))
    with WatcherProcess(dumps, tmp_path, redis_url, engine.url):
        assert not registered(bus).final_norm


def test_dumps_are_judged_and_notices_taken_while_the_process_runs(
    bus: Bus, redis_url: str, dumps: Path, tmp_path: Path, engine: StubEngine
) -> None:
    engine.boot()
    start_run(bus, tmp_path / "out")
    good, bad, lost = (make_sample(ordinal) for ordinal in range(3))
    with WatcherProcess(dumps, tmp_path, redis_url, engine.url) as watcher:
        site = registered(bus)
        claim(bus, site.site, [good, bad, lost])
        path = publish(dumps, good.request(), good.token_ids)
        publish(dumps, bad.request(), good.token_ids)
        lose(dumps, lost.request(), "evicted")
        (dumps / "notes.txt").write_text("not ours")
        wait_until(lambda: bus.jobs.queued(site.site) == [str(good.request())], what="the storage job")
        wait_until(lambda: sorted(entry.name for entry in dumps.glob("hr-*")) == [path.name], what="the others to go")
        watcher.wait_for("left alone")
        assert watcher.text().count("left alone") == 1
        measured = path.stat().st_size
        wait_until(lambda: registered(bus).dump_bytes >= measured, what="the measurement")
        assert watcher.stop() == 0
    assert path.exists()
    assert (dumps / "notes.txt").exists()
    reasons = {reason for _, _, reason in bus.runs.dead(RUN)}
    assert reasons == {"token_content", "evicted"}
    assert json.loads((tmp_path / "quarantine" / str(bad.request()) / "verdict.json").read_text())["site"] == site.site
    lines = [json.loads(line) for line in watcher.text().splitlines()]
    assert all(line["service"] == "watcher" for line in lines)
    assert [line["request"] for line in lines if line["event"] == "captured"] == [str(good.request())]


def test_a_file_is_taken_by_its_event_long_before_the_next_rescan(
    bus: Bus, redis_url: str, dumps: Path, tmp_path: Path, engine: StubEngine
) -> None:
    port = free_port()
    leases = {"lease_captured_seconds": 2000, "lease_storing_seconds": 2000, "site_ttl_seconds": 2000}
    leases["lease_grace_seconds"] = 2000
    slow = {"rescan_seconds": 500, "heartbeat_seconds": 500, "health_port": port, **leases}
    with WatcherProcess(dumps, tmp_path, redis_url, engine.url, **slow) as watcher:
        wait_until(lambda: "engine: no engine has started" in ready(port)[1], what="the first round")
        attempts = iter(range(1000))

        def taken() -> bool:
            # The first ones may come before inotify listens: nobody looks at them until a later one's event.
            lose(dumps, make_sample(0).request(next(attempts)), "aborted")
            return '"reason": "aborted"' in watcher.text()

        wait_until(taken, what="an event")


def test_a_second_watcher_is_refused_at_once(
    bus: Bus, redis_url: str, dumps: Path, tmp_path: Path, engine: StubEngine
) -> None:
    with WatcherProcess(dumps, tmp_path, redis_url, engine.url) as first:
        first.wait_for("watching")
        (tmp_path / "second").mkdir()
        with WatcherProcess(dumps, tmp_path / "second", redis_url, engine.url) as second:
            assert second.process.wait(20) == 4
        assert f"{dumps} is watched by process {first.process.pid} already" in second.text()
        first.process.kill()
        first.process.wait(10)
        (tmp_path / "third").mkdir()
        with WatcherProcess(dumps, tmp_path / "third", redis_url, engine.url) as third:
            third.wait_for("watching")


def test_a_quarantine_inside_the_dump_folder_is_refused(redis_url: str, dumps: Path, tmp_path: Path) -> None:
    inside = dumps / "quarantine"
    with WatcherProcess(dumps, tmp_path, redis_url, "http://127.0.0.1:9", quarantine_dir=inside) as watcher:
        assert watcher.process.wait(20) == 2
    assert "HEADRACE_QUARANTINE_DIR" in watcher.text()


@pytest.mark.parametrize("below", ["", "deeper"])
def test_a_quarantine_that_is_no_folder_is_refused(redis_url: str, dumps: Path, tmp_path: Path, below: str) -> None:
    (tmp_path / "file").touch()
    place = tmp_path / "file" / below
    with WatcherProcess(dumps, tmp_path, redis_url, "http://127.0.0.1:9", quarantine_dir=place) as watcher:
        assert watcher.process.wait(20) == 2
    assert f"quarantine {place} is not a folder; set HEADRACE_QUARANTINE_DIR" in watcher.text()


def test_a_quarantine_that_keeps_nothing_needs_no_folder(redis_url: str, dumps: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    nothing = {"quarantine_dir": tmp_path / "file", "quarantine_bytes": 0}
    with WatcherProcess(dumps, tmp_path, redis_url, "http://127.0.0.1:9", **nothing) as watcher:
        watcher.wait_for("watching")


def test_a_folder_that_vanishes_ends_the_process(redis_url: str, tmp_path: Path) -> None:
    folder = tmp_path / "made"
    with WatcherProcess(folder, tmp_path, redis_url, "http://127.0.0.1:9") as watcher:
        watcher.wait_for("watching")
        folder.rename(tmp_path / "moved")
        assert watcher.process.wait(20) == 4
    assert "is gone" in watcher.text()


def test_the_registration_of_a_watcher_that_was_killed_is_taken_back(
    bus: Bus, redis_url: str, dumps: Path, tmp_path: Path, engine: StubEngine
) -> None:
    engine.boot()
    with WatcherProcess(dumps, tmp_path, redis_url, engine.url) as watcher:
        first = registered(bus)
        watcher.process.kill()
        watcher.process.wait(10)
    engine.health = 503
    with WatcherProcess(dumps, tmp_path, redis_url, engine.url):
        wait_until(lambda: not bus.sites.registered(), what="the old registration to go")
        engine.health = 200
        again = registered(bus)
    assert again.site == first.site
    assert again.incarnation != first.incarnation


def test_a_wrong_password_ends_the_process(dumps: Path, tmp_path: Path) -> None:
    with ValkeyServer(tmp_path / "redis", password="secret") as server:
        for given in ({}, {"redis_password": "wrong"}):
            with WatcherProcess(dumps, tmp_path, server.url, "http://127.0.0.1:9", **given) as watcher:
                assert watcher.process.wait(20) == 2
            assert "HEADRACE_REDIS_PASSWORD_FILE" in watcher.text()
            assert "secret" not in watcher.text()


def test_redis_may_come_late_and_go_in_the_middle(dumps: Path, tmp_path: Path, engine: StubEngine) -> None:
    engine.boot()
    server = ValkeyServer(tmp_path / "redis", aof=True)
    samples = [make_sample(ordinal) for ordinal in range(3)]
    port = free_port()
    leases = Leases(in_flight=600, captured=600, storing=600)
    with WatcherProcess(dumps, tmp_path, server.url, engine.url, health_port=port) as watcher:
        try:
            watcher.wait_for("Redis is away")
            assert "redis: no Redis" in ready(port)[1]
            (tmp_path / "second").mkdir()
            with WatcherProcess(dumps, tmp_path / "second", server.url, engine.url) as second:
                assert second.process.wait(20) == 4
            server.start()
            bus = Bus.open(server.url, leases=leases)
            site = registered(bus).site
            start_run(bus, tmp_path / "out")
            claim(bus, site, samples)
            publish(dumps, samples[0].request(), samples[0].token_ids)
            wait_until(lambda: len(bus.jobs.queued(site)) == 1, what="the first job")
            server.stop()
            publish(dumps, samples[1].request(), samples[1].token_ids)
            publish(dumps, samples[2].request(), samples[0].token_ids)
            wait_until(lambda: "redis: no Redis" in ready(port)[1], what="the watcher to see it")
            assert watcher.process.poll() is None
            server.start()
            queued = sorted(str(sample.request()) for sample in samples[:2])
            wait_until(lambda: sorted(bus.jobs.queued(site)) == queued, what="both jobs")
            wait_until(lambda: bus.runs.dead(RUN), what="the refusal")
            wait_until(lambda: ready(port)[0] == 200, what="readiness")
            view = bus.runs.get(RUN)
            assert view is not None
            assert (view.verdicts, view.mismatches) == (3, 1)
            bus.close()
            assert watcher.stop() == 0
        finally:
            server.kill()


def test_a_stop_is_quick_while_the_engine_hangs_and_redis_is_away(
    dumps: Path, tmp_path: Path, engine: StubEngine
) -> None:
    engine.on_canary = lambda request, ids: time.sleep(8)
    engine.boot()
    with WatcherProcess(dumps, tmp_path, f"redis://127.0.0.1:{free_port()}/0", engine.url) as watcher:
        wait_until(lambda: engine.canaries, what="the canary")
        watcher.wait_for("Redis is away")
        begun = time.monotonic()
        os.kill(watcher.process.pid, signal.SIGINT)
        assert watcher.process.wait(20) == 0
        assert time.monotonic() - begun < 6


def test_leases_are_held_while_the_dump_waits_for_its_writer(
    bus: Bus, redis_url: str, dumps: Path, tmp_path: Path, engine: StubEngine
) -> None:
    engine.boot()
    start_run(bus, tmp_path / "out")
    sample = make_sample(0)
    short = {"lease_captured_seconds": 1.5, "lease_storing_seconds": 1.5}
    with WatcherProcess(dumps, tmp_path, redis_url, engine.url, **short) as watcher:
        site = registered(bus).site
        claim(bus, site, [sample])
        path = publish(dumps, sample.request(), sample.token_ids)
        wait_until(lambda: bus.jobs.queued(site), what="the job")
        captured = f"hr:site:{site}:captured"
        first = bus.redis.zscore(captured, str(sample.request()))
        storing = bus.redis.zscore(f"hr:site:{site}:storing", str(sample.request()))
        assert first is not None
        assert storing is not None
        wait_until(lambda: (bus.redis.zscore(captured, str(sample.request())) or 0) > first, what="a renewal")
        later = f"hr:site:{site}:storing"
        wait_until(lambda: (bus.redis.zscore(later, str(sample.request())) or 0) > storing, what="a renewal")
        path.unlink()
        wait_until(lambda: bus.requests.reap_site(site)[0] == [str(sample.request())], what="the lease to lapse")
        assert watcher.stop() == 0

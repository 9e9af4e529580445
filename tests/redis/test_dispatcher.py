"""The dispatcher's loop: who gets which samples, what a run waits for, and how the process ends."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from headrace.bus import Bus, keys
from headrace.errors import Unreadable
from headrace.manifest import INPUTS_FOLDER
from headrace.runs import Identity
from tests.support.bus_values import LONG
from tests.support.dispatching import DispatcherProcess, Engine, dispatching, hanging_listener, submit, view_of
from tests.support.dumps import ENGINE, WEIGHTS
from tests.support.server import ValkeyServer
from tests.support.stores import RUN
from tests.support.waiting import wait_until
from tests.support.watched import make_site

pytestmark = pytest.mark.redis


@pytest.fixture
def bus(bus: Bus) -> Iterator[Bus]:
    """The bus with leases that do not lapse meanwhile."""
    opened = Bus.open(bus.where, leases=LONG)
    yield opened
    opened.close()


def wait_waiting(bus: Bus, *words: str, run: str = RUN) -> str:
    """Wait until the run waits for something that has these words."""

    def said() -> str:
        what = view_of(bus, run).waiting_for
        return what if all(word in what for word in words) else ""

    return wait_until(said, what=f"{words} in waiting_for")


def test_samples_go_to_the_engine_that_serves_their_run(bus: Bus, tmp_path: Path) -> None:
    with Engine() as engine, Engine() as other:
        bus.sites.register(engine.site(), 3600)
        bus.sites.register(other.site("s2", model="other"), 3600)
        submit(bus, tmp_path, [5, 6, 7])
        with dispatching(bus) as service:
            wait_until(lambda: len(engine.asked) == 3, what="three requests")
            wait_until(lambda: not service.health.problems(), what="readiness")
            assert bus.dispatchers.alive() == 1
        assert bus.dispatchers.alive() == 0
        assert engine.ordinals() == [0, 1, 2]
        assert other.asked == []
        assert all(body["input_ids"] and body["extra_key"] == body["rid"] for body in engine.asked)


def test_a_run_that_is_kept_to_one_site_goes_to_no_other(bus: Bus, tmp_path: Path) -> None:
    with Engine() as engine, Engine() as other:
        bus.sites.register(other.site("s2"), 3600)
        submit(bus, tmp_path, [5, 6, 7])
        bus.runs.keep_to(RUN, engine.site().site, 60)
        with dispatching(bus):
            wait_waiting(bus, f"no engine is registered at site {engine.site().site}")
            bus.sites.register(engine.site(), 3600)
            wait_until(lambda: len(engine.asked) == 3, what="three requests")
        assert other.asked == []


@pytest.mark.parametrize("change", [{"weight_version": "w-new"}, {"fingerprint": "e-new"}])
def test_an_engine_that_became_another_gets_nothing_until_it_is_as_before(
    bus: Bus, tmp_path: Path, change: dict[str, Any]
) -> None:
    with Engine() as engine:
        bus.sites.register(engine.site(**change), 3600)
        submit(bus, tmp_path, [5, 6])
        bus.runs.set_identity(RUN, Identity(engine=ENGINE, weight_version=WEIGHTS))
        with dispatching(bus):
            wait_waiting(bus, engine.url, *change.values(), "bring the engine back as it was", "start another run")
            assert view_of(bus).pending == 2
            bus.sites.register(engine.site(), 3600)
            wait_until(lambda: len(engine.asked) == 2, what="two requests")
            wait_until(lambda: not view_of(bus).waiting_for, what="the run to wait for nothing")
        assert view_of(bus).reasons.keys() <= {"dispatcher_stopped"}


def test_samples_that_only_a_busy_site_takes_do_not_starve_the_other(bus: Bus, tmp_path: Path) -> None:
    with Engine() as small, Engine() as large:
        bus.sites.register(small.site("small", context_length=10), 3600)
        bus.sites.register(large.site("large", max_requests=1), 3600)
        large.reply = lambda body: (503, b"busy")
        submit(bus, tmp_path, [20] * 300 + [5])
        with dispatching(bus, window=1000):
            wait_until(lambda: 300 in small.ordinals(), what="the short sample behind 300 long ones")
        assert small.ordinals() == [300]


def test_a_sample_that_fits_no_engine_is_rejected_after_a_while(bus: Bus, tmp_path: Path) -> None:
    with Engine() as engine:
        bus.sites.register(engine.site(context_length=10), 3600)
        submit(bus, tmp_path, [20, 5, 30])
        with dispatching(bus, site_ttl_seconds=0.5):
            wait_until(lambda: engine.ordinals() == [1], what="the sample that fits")
            wait_until(lambda: bus.redis.zcard(keys.recording(RUN)) == 2, what="two rejections")
        assert view_of(bus).pending == 0


def test_a_sample_that_fits_only_a_larger_engine_waits_for_it(bus: Bus, tmp_path: Path) -> None:
    with Engine() as engine:
        bus.sites.register(engine.site(context_length=10), 3600)
        submit(bus, tmp_path, [20, 5])
        with dispatching(bus):
            wait_until(lambda: engine.ordinals() == [1], what="the sample that fits")
            bus.sites.register(engine.site(context_length=100), 3600)
            wait_until(lambda: engine.ordinals() == [0, 1], what="the other one")


def test_a_proxy_that_answers_in_place_of_the_engine_costs_attempts_and_ends(bus: Bus, tmp_path: Path) -> None:
    with Engine(lambda body: (200, b"<html>Bad gateway</html>")) as engine:
        bus.sites.register(engine.site(), 3600)
        submit(bus, tmp_path, [5], max_attempts=2)
        with dispatching(bus):
            wait_until(lambda: view_of(bus).reasons == {"bad_answer": 2}, what="two burnt attempts")
            wait_until(lambda: bus.redis.zcard(keys.recording(RUN)) == 1, what="the failed sample")
        assert len(engine.asked) == 2


def test_free_text_of_an_engine_is_no_reason(bus: Bus, tmp_path: Path) -> None:
    with Engine(lambda body: (200, b'{"meta_info": {"headrace": "dropped:/some/path is odd"}}')) as engine:
        bus.sites.register(engine.site(), 3600)
        submit(bus, tmp_path, [5], max_attempts=1)
        with dispatching(bus):
            wait_until(lambda: view_of(bus).reasons == {"internal": 1}, what="the burnt attempt")


def test_a_run_whose_files_are_out_of_reach_waits_for_them_and_others_go_on(bus: Bus, tmp_path: Path) -> None:
    with Engine() as engine:
        bus.sites.register(engine.site(), 3600)
        submit(bus, tmp_path / "a", [5], run="a")
        submit(bus, tmp_path / "b", [6], run="b")
        (tmp_path / "a" / INPUTS_FOLDER).rename(tmp_path / "away")
        with dispatching(bus):
            wait_until(lambda: len(engine.asked) == 1, what="the other run's request")
            wait_waiting(bus, str(tmp_path / "a"), run="a")
            assert engine.asked[0]["rid"].startswith("hr-b-")
            assert view_of(bus, "a").state == "active"
            (tmp_path / "away").rename(tmp_path / "a" / INPUTS_FOLDER)
            wait_until(lambda: len(engine.asked) == 2, what="its request")
            wait_until(lambda: not view_of(bus, "a").waiting_for, what="it to wait for nothing")


def test_a_run_whose_samples_are_damaged_is_paused_and_others_go_on(bus: Bus, tmp_path: Path) -> None:
    with Engine() as engine:
        bus.sites.register(engine.site(), 3600)
        submit(bus, tmp_path / "a", [5], run="a")
        submit(bus, tmp_path / "b", [6], run="b")
        path = tmp_path / "a" / INPUTS_FOLDER / "samples.jsonl"
        path.write_bytes(path.read_bytes().replace(b'"ordinal":0', b'"ordinal":9'))
        with dispatching(bus):
            wait_until(lambda: view_of(bus, "a").state == "paused", what="the pause")
            wait_until(lambda: len(engine.asked) == 1, what="the other run's request")
        assert "damaged" in view_of(bus, "a").reason


def test_what_must_not_happen_ends_the_dispatcher(bus: Bus, tmp_path: Path) -> None:
    bus.redis.set("hr:runs", "not a set")
    with pytest.raises(Exception, match="WRONGTYPE"), dispatching(bus) as service:
        wait_until(service.stop.is_set, what="the end")


def test_a_request_whose_thread_dies_ends_the_dispatcher(bus: Bus, tmp_path: Path) -> None:
    def reply(body: dict[str, Any]) -> tuple[int, bytes]:
        bus.redis.set(keys.in_flight(RUN), "not a sorted set")
        return 200, b'{"meta_info": {}}'

    with Engine(reply) as engine:
        bus.sites.register(engine.site(), 3600)
        submit(bus, tmp_path, [5])
        with pytest.raises(Exception, match="WRONGTYPE"), dispatching(bus) as service:
            wait_until(service.stop.is_set, what="the end")


def test_a_dispatcher_that_is_stopped_gives_back_what_hangs_without_burning_it(bus: Bus, tmp_path: Path) -> None:
    with hanging_listener() as url:
        bus.sites.register(make_site("s1", url=url), 3600)
        submit(bus, tmp_path, [5] * 8, max_attempts=1)
        with dispatching(bus):
            wait_until(lambda: view_of(bus).in_flight == 8, what="eight requests in flight")
        view = view_of(bus)
        assert (view.in_flight, view.pending, view.reasons) == (0, 8, {"dispatcher_stopped": 8})
        assert bus.runs.dead(RUN) == []


def test_a_dispatcher_waits_for_a_redis_that_is_late_and_a_stop_ends_the_wait(tmp_path: Path) -> None:
    server = ValkeyServer(tmp_path / "redis")
    with DispatcherProcess(tmp_path, server.url) as dispatcher:
        dispatcher.wait_for("waiting for Redis")
        with server:
            dispatcher.wait_for("dispatching")
        dispatcher.process.terminate()
        assert dispatcher.process.wait(20) == 0
        assert dispatcher.text().count("waiting for Redis") == 1
    with DispatcherProcess(tmp_path, server.url) as dispatcher:
        wait_until(lambda: dispatcher.text().count("waiting for Redis") == 2, what="the second wait")
        dispatcher.process.terminate()
        assert dispatcher.process.wait(20) == 0


def test_a_dispatcher_with_a_wrong_password_ends_and_says_so(tmp_path: Path) -> None:
    with (
        ValkeyServer(tmp_path / "redis", password="right") as server,
        DispatcherProcess(tmp_path, server.url, redis_password="wrong") as dispatcher,
    ):
        assert dispatcher.process.wait(30) == 2
    assert "HEADRACE_REDIS_PASSWORD_FILE" in dispatcher.text()


def test_a_run_of_a_newer_version_is_passed_over(bus: Bus, tmp_path: Path) -> None:
    with Engine() as engine:
        bus.sites.register(engine.site(), 3600)
        submit(bus, tmp_path / "a", [5], run="a")
        bus.redis.hset(keys.run("a"), "spec", b'{"schema": 99}')
        with pytest.raises(Unreadable):
            bus.runs.get("a")
        submit(bus, tmp_path / "b", [6], run="b")
        with dispatching(bus):
            wait_until(lambda: len(engine.asked) == 1, what="the other run's request")

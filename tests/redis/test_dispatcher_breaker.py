"""Engines that fail or hang under a dispatcher: they get few requests, are probed, and get all when they are back."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import REGISTRY

from headrace.bus import Bus, keys
from headrace.ids import RequestId
from headrace_dispatcher.breaker import FAILURES
from tests.support.bus_values import LONG, make_attempt
from tests.support.dispatching import Engine, dispatching, submit, view_of
from tests.support.stores import RUN
from tests.support.waiting import wait_until

pytestmark = pytest.mark.redis

AT_ONCE = 4
GOOD = (200, b'{"text": "", "meta_info": {}}')


@pytest.fixture
def bus(bus: Bus) -> Iterator[Bus]:
    """The bus with leases that do not lapse meanwhile."""
    opened = Bus.open(bus.where, leases=LONG)
    yield opened
    opened.close()


def gauge(site: str) -> float | None:
    """The site's metric, if there is one; sites of other tests may still have theirs."""
    return REGISTRY.get_sample_value("headrace_breaker_open", {"site": site})


def fail(engine: Engine) -> None:
    engine.reply, engine.health = lambda body: (503, b"loading"), lambda: 503


def wait_waiting(bus: Bus, *words: str) -> None:
    """Wait until the run waits for something that has these words."""

    def said() -> bool:
        what = view_of(bus).waiting_for
        return all(word in what for word in words)

    wait_until(said, 60, f"{words} in waiting_for")


def test_an_engine_that_fails_gets_few_requests_then_one_and_then_all(bus: Bus, tmp_path: Path) -> None:
    with Engine() as engine:
        fail(engine)
        bus.sites.register(engine.site("failing", max_requests=AT_ONCE), 3600)
        submit(bus, tmp_path, [5] * 20, max_attempts=1)
        with dispatching(bus):
            wait_until(lambda: engine.probed >= 2, what="two probes")
            sent = len(engine.asked)
            assert sent < AT_ONCE + FAILURES
            wait_waiting(bus, engine.url, "a probe that brought http_503", "probed until it passes")
            assert gauge("failing") == 1

            released = threading.Event()

            def hold(body: dict[str, Any]) -> tuple[int, bytes]:
                released.wait(60)
                return GOOD

            engine.reply, engine.health = hold, lambda: 200
            wait_until(lambda: len(engine.asked) == sent + 1, what="the one request")
            assert view_of(bus).in_flight == 1
            wait_waiting(bus, engine.url, "then tried with one request")
            assert gauge("failing") == 0
            released.set()
            wait_until(lambda: len(engine.asked) == sent + AT_ONCE, what="a full engine")
            wait_until(lambda: not view_of(bus).waiting_for, what="the run to wait for nothing")
            assert gauge("failing") == 0
        assert bus.runs.dead(RUN) == []
        assert view_of(bus).reasons.keys() <= {"http_503", "dispatcher_stopped"}


def test_an_engine_that_hangs_burns_what_was_in_flight_and_no_more(bus: Bus, tmp_path: Path) -> None:
    released = threading.Event()

    def hang(body: dict[str, Any] | None = None) -> tuple[int, bytes]:
        released.wait(60)
        return GOOD

    with Engine(hang) as engine:
        engine.health = lambda: hang()[0]
        bus.sites.register(engine.site(max_requests=AT_ONCE), 3600)
        submit(bus, tmp_path, [5] * 20, max_attempts=9)
        with dispatching(bus, engine_timeout_seconds=1):
            wait_until(lambda: engine.probed >= 3, 60, what="three probes")
            wait_waiting(bus, engine.url, "a probe without an answer in 1 s")
            assert view_of(bus).reasons == {"timeout": AT_ONCE}
            assert len(bus.runs.dead(RUN)) == len(engine.asked) == AT_ONCE
            released.set()
            wait_until(lambda: len(engine.asked) == 2 * AT_ONCE, 60, what="a full engine")


def test_beside_an_engine_that_fails_the_other_goes_on(bus: Bus, tmp_path: Path) -> None:
    with Engine() as good, Engine() as bad:
        fail(bad)
        bus.sites.register(good.site("good"), 3600)
        bus.sites.register(bad.site("bad", max_requests=AT_ONCE), 3600)
        submit(bus, tmp_path, [5] * 40, max_attempts=1)
        with dispatching(bus):
            wait_until(lambda: good.ordinals() == list(range(40)), what="all samples")
            # Nothing is pending any more: another run makes the engine fail, if it has not.
            submit(bus, tmp_path / "more", [6] * 20, run="more", max_attempts=1)
            wait_until(lambda: len(good.asked) == 60, what="all samples of the other run")
            assert len(bad.asked) < AT_ONCE + FAILURES
            assert view_of(bus).waiting_for == view_of(bus, "more").waiting_for == ""
        assert bus.runs.dead(RUN) == bus.runs.dead("more") == []


def test_another_boot_of_an_engine_that_failed_is_tried_with_one_request_first(bus: Bus, tmp_path: Path) -> None:
    with Engine() as engine:
        fail(engine)
        bus.sites.register(engine.site("again"), 3600)
        submit(bus, tmp_path, [5] * 20)
        with dispatching(bus):
            wait_until(lambda: gauge("again") == 1, what="the breaker to open")
            wait_until(lambda: view_of(bus).in_flight == 0, what="what was in flight to end")
            released = threading.Event()

            def hold(body: dict[str, Any]) -> tuple[int, bytes]:
                released.wait(60)
                return GOOD

            engine.reply = hold
            asked = len(engine.asked)
            bus.sites.register(engine.site("again", boot="boot 2"), 3600)
            wait_waiting(bus, engine.url, "was started again after it failed")
            assert len(engine.asked) - asked <= 1
            released.set()
            wait_until(lambda: len(engine.asked) - asked == 20, what="all samples")
            assert gauge("again") == 0
            bus.sites.unregister("again")
            wait_until(lambda: gauge("again") is None, what="the metric to go with the site")


def stored(bus: Bus, body: dict[str, Any]) -> tuple[int, bytes]:
    """A good answer to a request whose row is there at once."""
    bus.requests.stored(RequestId.parse(body["rid"]), "s1", 1)
    return GOOD


def test_a_prompt_on_which_an_engine_fails_each_time_burns_its_attempts_and_no_others(bus: Bus, tmp_path: Path) -> None:
    def reply(body: dict[str, Any]) -> tuple[int, bytes]:
        return (500, b"CUDA error") if body["rid"].startswith(f"hr-{RUN}-3-") else stored(bus, body)

    with Engine(reply) as engine:
        bus.sites.register(engine.site(max_requests=AT_ONCE), 3600)
        submit(bus, tmp_path, [5] * AT_ONCE, max_attempts=2)
        with dispatching(bus):
            wait_until(lambda: len(bus.runs.dead(RUN)) == 2, 60, what="the prompt to run out of attempts")
            assert {request.split("-")[2] for request, _, _ in bus.runs.dead(RUN)} == {"3"}
            assert {reason for _, _, reason in bus.runs.dead(RUN)} == {"http_500"}


def test_a_prompt_that_always_gets_a_5xx_beside_others_runs_out_of_attempts_and_costs_them_none(
    bus: Bus, tmp_path: Path
) -> None:
    bad = f"hr-{RUN}-3-"
    with Engine(lambda body: (503, b"no") if body["rid"].startswith(bad) else stored(bus, body)) as engine:
        site = engine.site(max_requests=AT_ONCE)
        bus.sites.register(site, 3600)
        submit(bus, tmp_path, [5] * 6, max_attempts=2)
        submit(bus, tmp_path / "more", [6] * 300, run="more", max_attempts=1)
        # One that is held there all the time, so that the bad one never has the engine to itself.
        assert bus.runs.feed(RUN, 0, [""] * 6) == 6
        assert bus.requests.claim(RUN, site.site, site.boot, [make_attempt(0, tokens=5, run=RUN)]) == ["claimed"]
        with dispatching(bus):
            wait_until(lambda: len(bus.runs.dead(RUN)) == 2, 60, what="the prompt to run out of attempts")
            wait_until(lambda: view_of(bus, "more").state == "finished", 60, what="the other run")
        assert {RequestId.parse(request).ordinal for request, _, _ in bus.runs.dead(RUN)} == {3}
        assert {reason for _, _, reason in bus.runs.dead(RUN)} == {"http_503"}
        assert len([body for body in engine.asked if body["rid"].startswith(bad)]) == 5 * 2
        assert (view_of(bus).stored, view_of(bus).pending) == (4, 0)
        assert bus.runs.dead("more") == []


@pytest.mark.parametrize("samples", [1, 3, 30])
def test_an_engine_that_is_away_for_a_while_costs_no_sample_an_attempt(bus: Bus, tmp_path: Path, samples: int) -> None:
    with Engine() as engine:
        fail(engine)
        bus.sites.register(engine.site(max_requests=AT_ONCE), 3600)
        submit(bus, tmp_path, [5] * samples, max_attempts=1)
        with dispatching(bus):
            wait_until(lambda: engine.probed >= 1, what="a probe")
            assert set(bus.redis.hvals(keys.spared(RUN))) <= {b"1", b"2", b"3"}
            engine.reply, engine.health = lambda body: stored(bus, body), lambda: 200
            wait_until(lambda: view_of(bus).stored == samples, 60, what="all samples")
        assert bus.runs.dead(RUN) == []
        assert not bus.redis.exists(keys.spared(RUN))


def test_a_prompt_that_kills_its_engine_burns_its_attempts_over_the_boots(bus: Bus, tmp_path: Path) -> None:
    deadly = f"hr-{RUN}-3-"
    killed = threading.Event()

    def reply(body: dict[str, Any]) -> tuple[int, bytes]:
        if body["rid"].startswith(deadly):
            killed.set()
        return (502, b"nobody is there") if killed.is_set() else stored(bus, body)

    with Engine(reply) as engine:
        engine.health = lambda: 503
        submit(bus, tmp_path, [5] * AT_ONCE, max_attempts=2)
        with dispatching(bus):
            for boot in range(20):
                killed.clear()
                bus.sites.register(engine.site(max_requests=AT_ONCE, boot=f"boot {boot}"), 3600)
                wait_until(killed.is_set, 30, what="the engine to be killed")
                wait_until(lambda: view_of(bus).pending + len(bus.runs.dead(RUN)) >= 1, what="the failure to be seen")
                bus.sites.unregister("s1")
                wait_until(lambda: gauge("s1") is None, what="the site to be forgotten")
                if len(bus.runs.dead(RUN)) == 2:
                    break
            assert {request.split("-")[2] for request, _, _ in bus.runs.dead(RUN)} == {"3"}


def test_what_fails_beside_a_request_of_another_dispatcher_burns_nothing(bus: Bus, tmp_path: Path) -> None:
    with Engine(lambda body: (500, b"CUDA error")) as engine:
        site = engine.site(max_requests=AT_ONCE)
        bus.sites.register(site, 3600)
        submit(bus, tmp_path, [5] * AT_ONCE, max_attempts=9)
        assert bus.runs.feed(RUN, 0, [""] * AT_ONCE) == AT_ONCE
        other = make_attempt(0, tokens=5, run=RUN)
        assert bus.requests.claim(RUN, site.site, site.boot, [other]) == ["claimed"]
        with dispatching(bus):
            wait_until(lambda: engine.probed >= 2, 60, what="the engine to be tried, and probed again")
            assert bus.runs.dead(RUN) == []
            request = RequestId.parse(other.request)
            assert bus.requests.end(request, burn=False, kind="error", reason="connection") == "pending"
            wait_until(lambda: bus.runs.dead(RUN), 60, what="one that fails alone to burn")


def test_an_engine_behind_a_proxy_that_answers_for_it_burns_what_was_in_flight_at_most(
    bus: Bus, tmp_path: Path
) -> None:
    answers = itertools.cycle([(503, b""), (503, b""), (200, b"<html>come back later</html>")])
    with Engine(lambda body: next(answers)) as engine:
        engine.health = lambda: 503
        bus.sites.register(engine.site(max_requests=AT_ONCE), 3600)
        submit(bus, tmp_path, [5] * 50, max_attempts=9)
        with dispatching(bus):
            wait_until(lambda: engine.probed >= 1, 60, what="a probe")
            wait_until(lambda: view_of(bus).in_flight == 0, what="what was in flight to end")
            assert len(engine.asked) < AT_ONCE + FAILURES
            assert len(bus.runs.dead(RUN)) <= AT_ONCE
            assert {reason for _, _, reason in bus.runs.dead(RUN)} == {"bad_answer"}
            asked, dead = len(engine.asked), len(bus.runs.dead(RUN))
            answers = itertools.repeat((200, b"<html>come back later</html>"))
            engine.health = lambda: 200  # the proxy's, too
            wait_until(lambda: len(bus.runs.dead(RUN)) == dead + 2, 60, what="two trials")
            assert len(engine.asked) == asked + 2, "one burns a trial"


def test_an_engine_without_room_rests_and_is_not_taken_for_one_that_fails(bus: Bus, tmp_path: Path) -> None:
    def refuse(body: dict[str, Any]) -> tuple[int, bytes]:
        return GOOD if len(engine.asked) > 2 * FAILURES else (200, b'{"meta_info": {"headrace": "dropped:no_room"}}')

    with Engine(refuse) as engine:
        engine.health = lambda: 503
        bus.sites.register(engine.site("full"), 3600)
        submit(bus, tmp_path, [5] * 20, max_attempts=1)
        with dispatching(bus):
            wait_until(lambda: set(engine.ordinals()) == set(range(20)), what="all samples")
            wait_until(lambda: view_of(bus).pending == 0, what="the refused ones to be sent again")
            assert gauge("full") == 0
        assert bus.runs.dead(RUN) == []
        assert engine.probed == 0

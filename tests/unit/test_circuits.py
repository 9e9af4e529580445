"""What each engine may be sent after what its requests came to, over probes, restarts and losses."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import structlog
from prometheus_client import REGISTRY

from headrace.bus.values import Site
from headrace.generate import Answer
from headrace.ids import RequestId
from headrace_dispatcher.breaker import ANSWER_SECONDS, FAILURES, LONGEST_WAIT
from headrace_dispatcher.circuits import Circuits
from headrace_dispatcher.flights import Flight
from tests.support.waiting import wait_until
from tests.support.watched import make_site

SITE = make_site("circuits")
NEXT = replace(SITE, boot="the next boot")
GOOD = Answer(outcome="answered")
BROKEN = Answer(outcome="unavailable", reason="connection")
LATE = Answer(outcome="timeout", reason="timeout")


class Bench:
    """Circuits whose clock and whose engine's health are the test's."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.health = ""
        self.probed = 0
        self.crashes: list[BaseException] = []
        self.circuits = Circuits(self._probe, lambda: None, self.crashes.append, lambda: self.now)
        self._requests = 0

    def _probe(self, url: str) -> str:
        self.probed += 1
        return self.health

    def send(self, count: int, site: Site = SITE) -> list[Flight]:
        flights = []
        for _ in range(count):
            self._requests += 1
            request = RequestId.make("run1", self._requests, "aaaaaaaa", range(3))
            flight = Flight(request=request, site=site.site, boot=site.boot, url=site.url, token_ids=range(3))
            self.circuits.sent(flight)
            flights.append(flight)
        return flights

    def end(self, flights: list[Flight], answer: Answer) -> list[bool]:
        return [self.circuits.answered(flight, answer) for flight in flights]

    def break_open(self, site: Site = SITE) -> None:
        """Have as many requests fail as open the breaker."""
        self.circuits.look([site])
        self.end(self.send(FAILURES, site), BROKEN)
        assert self.circuits.admits(site) == 0

    def pass_probe(self, site: Site = SITE) -> None:
        """Let the wait go by, and the probe pass."""
        self.now += LONGEST_WAIT
        self.circuits.look([site])
        wait_until(lambda: self.circuits.admits(site) == 1, what="the probe to pass")

    def fail_probe(self, problem: str) -> None:
        """Let the wait go by, and the probe fail."""
        self.health = problem
        self.now += LONGEST_WAIT
        self.circuits.look([SITE])
        wait_until(lambda: problem in self.circuits.waiting([SITE]), what="the probe to fail")


@pytest.fixture
def bench() -> Iterator[Bench]:
    bench = Bench()
    yield bench
    bench.circuits.look([])
    assert not bench.crashes


def gauge() -> float | None:
    return REGISTRY.get_sample_value("headrace_breaker_open", {"site": SITE.site})


@pytest.mark.parametrize("reason", ["bad_answer", "http_401", "http_404", "http_429"])
def test_what_a_proxy_may_have_said_opens_at_once_and_an_answer_of_an_engine_does_not(
    bench: Bench, reason: str
) -> None:
    bench.circuits.look([SITE])
    flights = bench.send(8)
    for seen in ("http_400", "aborted"):
        bench.end(flights[:1], BROKEN)
        bench.end(flights[1:2], Answer(outcome="refused", reason=seen))
        bench.end(flights[2:3], BROKEN)
        assert bench.circuits.admits(SITE) is None
        flights = flights[3:]
    bench.end(flights, Answer(outcome="refused", reason=reason))
    assert bench.circuits.admits(SITE) == 0
    assert reason in bench.circuits.waiting([SITE])
    bench.pass_probe()
    bench.end(bench.send(1), Answer(outcome="refused", reason=reason))
    assert bench.circuits.admits(SITE) == 0, "one per trial"


def test_only_the_request_that_tries_an_engine_is_suspect_when_it_fails(bench: Bench) -> None:
    bench.circuits.look([SITE])
    flights = bench.send(10)
    assert bench.end(flights[:3], BROKEN) == [False] * 3
    bench.pass_probe()
    tried = bench.send(1)
    assert bench.end(flights[3:], BROKEN) == [False] * 7
    assert bench.end(tried, BROKEN) == [True]
    bench.pass_probe()
    assert bench.end(bench.send(1), GOOD) == [False]
    assert bench.end(bench.send(1), BROKEN) == [False]


def _idle(bench: Bench) -> None:
    bench.end(bench.send(8), GOOD)


def _failed_a_little(bench: Bench) -> None:
    bench.end(bench.send(1), BROKEN)


def _half_open(bench: Bench) -> None:
    bench.break_open()
    bench.pass_probe()


def _in_flight(bench: Bench) -> None:
    bench.send(8)


@pytest.mark.parametrize("away", [True, False])
@pytest.mark.parametrize(
    ("before", "admits"),
    [(_idle, None), (_in_flight, 1), (_failed_a_little, 1), (Bench.break_open, 1), (_half_open, 1)],
)
def test_the_next_boot_of_an_engine_that_failed_or_had_requests_is_tried_with_one_first(
    bench: Bench, before: Callable[[Bench], None], admits: int | None, away: bool
) -> None:
    bench.circuits.look([SITE])
    before(bench)
    if away:
        bench.circuits.look([])
        assert gauge() is None
    with structlog.testing.capture_logs() as logged:
        bench.circuits.look([NEXT])
        bench.circuits.look([NEXT])
    assert bench.circuits.admits(NEXT) == admits
    assert gauge() == 0
    assert len([entry for entry in logged if "started again after it failed" in entry["event"]]) == (admits or 0)
    assert bool(bench.circuits.waiting([NEXT])) == bool(admits)


def test_what_a_boot_that_hung_left_says_nothing_about_the_next(bench: Bench) -> None:
    bench.circuits.look([SITE])
    hung = bench.send(8)
    bench.circuits.look([NEXT])
    assert bench.end(hung, LATE) == [False] * 8
    assert bench.circuits.admits(NEXT) == 1
    assert bench.end(bench.send(1, NEXT), GOOD) == [False]
    assert bench.circuits.admits(NEXT) is None
    again = replace(SITE, boot="a third boot")
    bench.circuits.look([again])
    assert bench.circuits.admits(again) is None, "the one before was idle and well"


def test_an_engine_that_loses_the_request_that_tries_it_is_probed_again_and_its_late_answer_counts(
    bench: Bench,
) -> None:
    bench.break_open()
    bench.pass_probe()
    lost, probed = bench.send(1), bench.probed
    bench.now += ANSWER_SECONDS - 1
    bench.circuits.look([SITE])
    assert (bench.circuits.admits(SITE), gauge()) == (0, 0)
    bench.now += 1
    bench.circuits.look([SITE])
    assert gauge() == 1
    assert "without an answer" in bench.circuits.waiting([SITE])
    bench.pass_probe()
    assert bench.probed == probed + 1
    second = bench.send(1)
    assert bench.end(lost, GOOD) == [False]
    assert bench.circuits.admits(SITE) is None
    assert bench.end(second, BROKEN) == [False]


def test_the_failure_of_a_lost_request_is_not_suspect_when_the_engine_is_tried_anew(bench: Bench) -> None:
    bench.break_open()
    bench.pass_probe()
    lost = bench.send(1)
    bench.now += ANSWER_SECONDS
    bench.circuits.look([SITE])
    bench.pass_probe()
    assert bench.end(lost, BROKEN) == [False]
    assert bench.circuits.admits(SITE) == 1


def test_the_metric_is_1_only_while_the_engine_gets_nothing(bench: Bench) -> None:
    bench.break_open()
    assert gauge() == 1
    bench.pass_probe()
    assert gauge() == 0, "an idle engine that is well may stay so for long"
    bench.end(bench.send(1), GOOD)
    assert gauge() == 0


def test_dispatchers_that_see_the_same_say_the_same_at_whatever_time(bench: Bench) -> None:
    other = Bench()
    bench.break_open()
    other.now += 3
    other.circuits.look([SITE])
    other.end(other.send(3 * FAILURES), BROKEN)
    said = bench.circuits.waiting([SITE])
    assert SITE.url in said
    assert "connection" in said
    assert "probed until it passes" in said
    bench.pass_probe()
    assert said == bench.circuits.waiting([SITE]) == other.circuits.waiting([SITE])
    bench.send(1)
    assert said == bench.circuits.waiting([SITE])
    bench.now += ANSWER_SECONDS
    bench.circuits.look([SITE])
    for each in (bench, other):
        each.fail_probe("a probe that brought http_503")
    assert bench.circuits.waiting([SITE]) == other.circuits.waiting([SITE])

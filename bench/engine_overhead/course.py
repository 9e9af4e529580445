"""The course of a comparison: each repetition measures every mode once, in turns, with prompts of the same lengths."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass

from bench.engine_overhead.load import Sent, Traffic, bodies, send
from bench.engine_overhead.processes import CpuSeconds, cpu_seconds
from bench.engine_overhead.server import Server
from bench.engine_overhead.taker import Taken, Taker
from headrace.capturestats import CaptureStats, read_stats, stats_file
from headrace.dumpfolder import read_card
from headrace.dumps import ENGINE_FILE

REFERENCE, OFF, ON = "reference", "off", "on"
_SETTLE_SECONDS = 60.0
_STATISTICS_SECONDS = 5.0  # the plugin writes them each second


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """One load on one server.

    `cpu` is what the server used for it, until the last dump was there; `taken` and `statistics` (the plugin's own,
    since its boot) are of `on` alone.
    """

    mode: str
    repetition: int
    sent: Sent
    cpu: CpuSeconds
    taken: Taken | None = None
    statistics: CaptureStats | None = None

    @property
    def speed(self) -> float:
        """Tokens per second, to the last answer."""
        return self.sent.tokens / self.sent.seconds

    @property
    def bandwidth(self) -> float:
        """Bytes of states per second, to the last dump."""
        if self.taken is None or not self.taken.published:
            return 0.0
        return self.taken.nbytes / max(self.sent.seconds, self.taken.last - self.sent.began)

    @property
    def answered(self) -> int:
        """Requests that were answered, and not with an error."""
        return self.sent.outcomes.get("answered", 0)

    @property
    def requests(self) -> int:
        """Requests that were sent."""
        return sum(self.sent.outcomes.values())

    @property
    def problems(self) -> list[str]:
        """What must not be: requests without an answer, lost ones, wrong dumps."""
        found = [f"{count} x {outcome}" for outcome, count in self.sent.outcomes.items() if outcome != "answered"]
        if self.taken is not None:
            found += [f"{count} lost: {reason}" for reason, count in self.taken.lost.items()]
            silent = self.requests - self.taken.settled
            found += [f"{silent} neither published nor lost"] if silent else []
            found += [f"{self.taken.wrong} wrong: {self.taken.examples}"] if self.taken.wrong else []
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Course:
    """Two servers, or one, and what they are sent."""

    captured: Server
    reference: Server | None
    taker: Taker
    traffic: Traffic
    seed: int = 0

    def warm_up(self, requests: int) -> None:
        """Send every server and mode a little, so that kernels are compiled and pages are there."""
        traffic = Traffic(
            requests=requests,
            in_flight=self.traffic.in_flight,
            shortest=self.traffic.shortest,
            longest=self.traffic.longest,
            vocabulary=self.traffic.vocabulary,
        )
        for mode in self._modes(0):
            self._measure(mode, -1, traffic)

    def run(self, repetitions: int) -> Iterator[Measurement]:
        """Measure, one mode after another; the order turns with each repetition."""
        for repetition in range(repetitions):
            for mode in self._modes(repetition):
                yield self._measure(mode, repetition, self.traffic)

    def _modes(self, repetition: int) -> list[str]:
        modes = [OFF, ON] if self.reference is None else [REFERENCE, OFF, ON]
        turn = repetition % len(modes)
        return modes[turn:] + modes[:turn]

    def _measure(self, mode: str, repetition: int, traffic: Traffic) -> Measurement:
        server = self.reference if mode == REFERENCE and self.reference is not None else self.captured
        run = "warm" if repetition < 0 else f"repetition{repetition}"
        lengths = traffic.lengths(self.seed + repetition)
        requests = bodies(run, lengths, traffic.vocabulary, ours=mode == ON)
        known = self._concluded()
        before = cpu_seconds(server.session)
        sent = send(server.url, requests, lengths, traffic.in_flight)
        taken = self.taker.wait(run, len(requests), _SETTLE_SECONDS) if mode == ON else None
        cpu = cpu_seconds(server.session) - before
        statistics = None if taken is None else self._statistics(known + taken.settled)
        return Measurement(mode=mode, repetition=repetition, sent=sent, cpu=cpu, taken=taken, statistics=statistics)

    def _concluded(self) -> int:
        found = self._latest()
        return 0 if found is None else found.published + sum(found.lost.values())

    def _statistics(self, concluded: int) -> CaptureStats | None:
        """The plugin's statistics, once they count so many requests; the last ones when that does not come."""
        deadline = time.monotonic() + _STATISTICS_SECONDS
        while self._concluded() < concluded and time.monotonic() < deadline:
            time.sleep(0.1)
        return self._latest()

    def _latest(self) -> CaptureStats | None:
        assert self.captured.dumps is not None
        card = read_card(self.captured.dumps / ENGINE_FILE)
        try:
            return read_stats(self.captured.dumps / stats_file(card.boot))
        except FileNotFoundError:  # before the first
            return None

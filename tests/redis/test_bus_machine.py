"""Random lives of samples on the real scripts, compared after each step with the plain model of them."""

from __future__ import annotations

from fnmatch import fnmatch
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, precondition, rule, run_state_machine_as_test

from headrace.bus import Bus, keys
from headrace.bus.values import Burn
from headrace.ids import RequestId
from headrace.lifecycle import State
from headrace_dispatcher.mismatches import MismatchLimit
from tests.support.bus_machine import ENGINE, OTHER, SITES, TOTAL, Driven, Notes
from tests.support.bus_model import BusModel
from tests.support.bus_values import BOOT, LONG, RUN, make_line, make_site, make_spec

pytestmark = pytest.mark.redis


picks = st.integers(0, 15)
ordinals = st.integers(-1, TOTAL)


class BusMachine(Driven):
    """Each rule does the same to the bus and to the model, sometimes twice to the bus, and compares both."""

    bus: Bus  # set by the test

    @initialize(max_attempts=st.integers(1, 3))
    def begin(self, max_attempts: int) -> None:
        self.bus.redis.flushall()
        self.model = BusModel(run=RUN, total=TOTAL, max_attempts=max_attempts)
        self.spec = make_spec(total=TOTAL, max_attempts=max_attempts)
        self.names: list[str] = []
        self.seen_done: set[int] = set()
        self.notes = Notes()
        assert self.bus.runs.create(self.spec) == "created"
        for site in SITES:
            self._register(make_site(site))
        self._activate()
        self._feed(4, [])
        self._compare()

    # ---- runs

    @rule(
        what=st.sampled_from(["feed", "feed", "feed stale", "pause", "activate", "activate", "cancel", "resubmit"]),
        size=st.integers(0, 4),
        rejected=st.lists(st.integers(0, 3), max_size=1),
    )
    def steer(self, what: str, size: int, rejected: list[int]) -> None:
        match what:
            case "pause":
                assert self.bus.runs.pause(RUN, "why") == self.model.set_state("paused", "active")
            case "activate":
                self._activate()
            case "cancel":
                expected = self.model.set_state("cancelled", "active", "paused", "rebuilding")
                assert self.bus.runs.cancel(RUN) == expected
            case "resubmit":
                assert self.bus.runs.create(self.spec) == self.model.create()
                self._activate()
            case _:
                self._feed(size, rejected, offset=-1 if what == "feed stale" else 0)
        self._compare()

    @rule(
        ordinal=ordinals,
        captured=st.booleans(),
        status=st.sampled_from(["stored", "failed", "failed", "rejected"]),
        reason=st.sampled_from(["r", "s"]),
        newest=st.booleans(),
        twice=st.booleans(),
    )
    def mark_done(self, ordinal: int, captured: bool, status: str, reason: str, newest: bool, twice: bool) -> None:
        if captured and self.model.captured:
            ordinal = RequestId.parse(min(self.model.captured)).ordinal
        sample = self.model.samples.get(ordinal)
        lines = [make_line(ordinal, status, reason, sample.live if sample is not None and newest else "")]
        assert self.bus.runs.mark_done(RUN, lines) == self.model.mark_done(lines)
        if twice:
            assert self.bus.runs.mark_done(RUN, lines) == 0
        self._compare()

    @rule(chosen=st.lists(ordinals, unique=True), twice=st.booleans())
    def reopen(self, chosen: list[int], twice: bool) -> None:
        self._reopen(chosen, twice)
        self._compare()

    @rule(forgotten=st.lists(ordinals, unique=True), twice=st.booleans())
    def note_failed(self, forgotten: list[int], twice: bool) -> None:
        self._note_failed(forgotten, twice)
        self._compare()

    @rule(
        what=st.sampled_from(["look", "look", "look late", "resume"]),
        share=st.sampled_from([0.25, 0.5, 1.0]),
        least=st.integers(1, 3),
        twice=st.booleans(),
    )
    def watch_verdicts(self, what: str, share: float, least: int, twice: bool) -> None:
        for _ in range(1 + twice):
            if what == "resume":
                self._resume()
            else:
                self._watch_verdicts(MismatchLimit(share=share, least=least), late=what == "look late")
        self._compare()

    @rule(ordinal=ordinals, reason=st.sampled_from(["exceeds_engine", "odd|name"]), twice=st.booleans())
    def reject(self, ordinal: int, reason: str, twice: bool) -> None:
        expected = self.model.reject(ordinal, reason)
        for _ in range(1 + twice):
            assert self.bus.requests.reject(RUN, ordinal, reason) == expected
        self._compare()

    # ---- attempts

    @rule(site=st.sampled_from(SITES), start=picks, count=st.integers(1, 4), old=st.booleans(), twice=st.booleans())
    def claim(self, site: str, start: int, count: int, old: bool, twice: bool) -> None:
        waiting = self.model.pending or [0]
        chosen = {waiting[(start + step) % len(waiting)] for step in range(count)}
        attempts = [self._attempt(ordinal, reuse=old) for ordinal in sorted(chosen)]
        held = self.model.load(site).requests
        expected = self.model.claim(site, BOOT, attempts)
        for _ in range(1 + twice):
            assert self.bus.requests.claim(RUN, site, BOOT, attempts) == expected
        load, caps = self.model.load(site), make_site(site).caps
        if load.requests > held:  # a claim that is repeated finds what was measured since
            assert load.requests <= caps.requests
            assert load.tokens <= caps.tokens
            assert load.promised_bytes + load.measured_bytes <= caps.dump_bytes
        self._compare()

    @precondition(lambda self: self.names)
    @rule(pick=picks, answered=st.booleans(), twice=st.booleans())
    def renew(self, pick: int, answered: bool, twice: bool) -> None:
        name = self._name(pick)
        lost = self.model.lease([name], answered=answered)
        for _ in range(1 + twice):
            if answered:
                self.bus.requests.answered(RUN, name)
            else:
                assert self.bus.requests.renew(RUN, [name]) == lost
        self._compare()

    @precondition(lambda self: self.names)
    @rule(
        pick=picks,
        which=st.sampled_from(["live", "captured", "any"]),
        burn=st.sampled_from([True, False, "if_alone", "if_alone"]),
        kind=st.sampled_from(["mismatch", "loss", "error"]),
        reason=st.sampled_from(["token_content", "no_room", "timeout"]),
        unless=st.booleans(),
        counted=st.booleans(),
        twice=st.booleans(),
    )
    def end(
        self, pick: int, which: str, burn: Burn, kind: Any, reason: str, unless: bool, counted: bool, twice: bool
    ) -> None:
        name = self._name(pick, {"live": self.model.in_flight, "captured": self.model.captured}.get(which))
        flags = {"unless_captured": unless, "counted": counted}
        expected = self.model.end(name, burn=burn, kind=kind, reason=reason, **flags)
        for _ in range(1 + twice):
            answer = self.bus.requests.end(RequestId.parse(name), burn=burn, kind=kind, reason=reason, **flags)
            assert answer == expected
        self._compare()

    @rule(ordinal=ordinals, times=st.integers(1, 6), twice=st.booleans())
    def spare(self, ordinal: int, times: int, twice: bool) -> None:
        """An engine answers one sample with a 5xx again and again."""
        for _ in range(times):
            attempts = [self._attempt(ordinal)] if ordinal in self.model.pending else []
            assert self.bus.requests.claim(RUN, SITES[0], BOOT, attempts) == self.model.claim(SITES[0], BOOT, attempts)
            for name in [attempt.request for attempt in attempts if attempt.request in self.model.in_flight]:
                how: Any = {"burn": False, "kind": "error", "reason": "http_503", "counted": True}
                expected = self.model.end(name, **how)
                for _ in range(1 + twice):
                    assert self.bus.requests.end(RequestId.parse(name), **how) == expected
            self._compare()

    @rule(pick=picks, share=st.sampled_from([0.25, 1.0]), resumed=st.booleans())
    def refuse_proven(self, pick: int, share: float, resumed: bool) -> None:
        """The writer refuses a dump whose verdict counted long ago, and a reaper looks at the window."""
        attempts = [self._attempt(ordinal) for ordinal in self.model.pending[:1]]
        assert self.bus.requests.claim(RUN, SITES[0], BOOT, attempts) == self.model.claim(SITES[0], BOOT, attempts)
        for attempt in attempts:
            self._capture(attempt.request, ENGINE, False)
        if resumed:
            self._resume()
        if self.model.captured:
            name = self._name(pick, self.model.captured)
            expected = self.model.end(name, burn=True, kind="mismatch", reason="corrupt")
            answer = self.bus.requests.end(RequestId.parse(name), burn=True, kind="mismatch", reason="corrupt")
            assert answer == expected
        self._watch_verdicts(MismatchLimit(share=share, least=1), late=False)
        self._compare()

    @precondition(lambda self: self.names)
    @rule(
        pick=picks,
        which=st.sampled_from(["live", "ended", "ended", "any"]),
        engine=st.sampled_from([ENGINE, ENGINE, ENGINE, OTHER]),
        twice=st.booleans(),
    )
    def capture(self, pick: int, which: str, engine: str, twice: bool) -> None:
        ended = {name: "" for name, known in self.model.requests.items() if known.outcome}
        self._capture(self._name(pick, {"live": self.model.in_flight, "ended": ended}.get(which)), engine, twice)
        self._compare()

    @precondition(lambda self: self.names)
    @rule(site=st.sampled_from(SITES), dumps=st.lists(picks, max_size=3), queued=st.lists(picks, max_size=3))
    def hold(self, site: str, dumps: list[int], queued: list[int]) -> None:
        there = [self._name(pick) for pick in dumps]
        waiting = [self._name(pick, self.model.storing) for pick in queued]
        assert self.bus.requests.hold(site, there, waiting) == self.model.hold(site, there, waiting)
        self._compare()

    @precondition(lambda self: self.names)
    @rule(pick=picks, behind=st.integers(0, 1), twice=st.booleans())
    def begin_store(self, pick: int, behind: int, twice: bool) -> None:
        name = self._name(pick, self.model.captured)
        job = self.model.samples[RequestId.parse(name).ordinal].job - behind if name in self.model.captured else 1
        site = self._site(name)
        expected = self.model.begin_store(name, job, site)
        for _ in range(1 + twice):
            assert self.bus.requests.begin_store(RequestId.parse(name), job, site) == expected
        self._compare()

    @precondition(lambda self: self.names)
    @rule(pick=picks, anyone=st.booleans(), twice=st.booleans())
    def stored(self, pick: int, anyone: bool, twice: bool) -> None:
        name = self._name(pick, None if anyone else self.model.captured)
        self._stored(name, twice)
        self._compare()

    # ---- time, the reaper and the sites

    @rule(
        lapse=st.lists(st.sampled_from(["in_flight", "captured", "storing", "recording"]), max_size=2),
        pick=picks,
        reap=st.sampled_from(["run", *SITES, ""]),
        twice=st.booleans(),
    )
    def time_passes(self, lapse: list[str], pick: int, reap: str, twice: bool) -> None:
        for kind in lapse:
            names = sorted(map(str, getattr(self.model, kind)))
            if names:
                self._lapse(kind, names[pick % len(names)])
        if reap == "run":
            self._reap_run()
            assert not twice or self.bus.requests.reap_run(RUN) == ([], [])
        elif reap:
            self._reap_site(reap)
            assert not twice or self.bus.requests.reap_site(reap) == ([], [])
        self._compare()

    @rule(
        site=st.sampled_from(SITES),
        what=st.sampled_from(["heartbeat", "heartbeat", "lose", "evict", "lose and evict"]),
        measured=st.sampled_from([0, 0, 500, 1000]),
        twice=st.booleans(),
    )
    def change_site(self, site: str, what: str, measured: int, twice: bool) -> None:
        if what == "heartbeat":
            self._register(make_site(site, dump_bytes=measured))
        if "lose" in what:
            for _ in range(1 + twice):
                self.bus.sites.unregister(site)
            self.model.unregister(site)
        if "evict" in what:
            assert self.bus.sites.evict(site) == self.model.evict(site)
            assert not twice or not self.bus.sites.evict(site)
        self._compare()

    def teardown(self) -> None:
        """Every sample can still reach its end, and nothing stays behind."""
        if not hasattr(self, "model"):
            return
        if self.model.state == "cancelled":
            assert self.bus.runs.create(self.spec) == self.model.create()
        self._activate()
        for _ in range(20 * TOTAL):
            if self.model.state == "finished" and not self.model.in_flight:
                break
            self._drain_once()
        view = self.bus.runs.get(RUN)
        assert view is not None
        assert (view.state, view.open, view.fed, view.in_flight, view.pending) == ("finished", 0, 0, 0, 0)
        assert view.finished_at is not None
        for site in SITES:
            self._reap_site(site)
            assert self.bus.redis.exists(keys.credits(site), keys.captured(site), keys.storing(site)) == 0
        check_ttls(self.bus)
        lasting = {key.decode() for key in self.bus.redis.scan_iter() if self.bus.redis.ttl(key) == -1}
        assert lasting <= {keys.RUNS, keys.SITES, "rq:queues"}, "the keys of a finished run expire"

    def _drain_once(self) -> None:
        if self.model.cursor < TOTAL and self.model.state == "active":
            self._feed(TOTAL, [])
        for name in sorted(self.model.in_flight):
            self._lapse("in_flight", name)
        self._reap_run()
        for site in SITES:
            for name in sorted(name for name, where in self.model.captured.items() if where == site):
                self._stored(name, False)
            self._reap_site(site)
            self._register(make_site(site))
        attempts = [self._attempt(ordinal) for ordinal in self.model.pending[:2]]
        assert self.bus.requests.claim(RUN, SITES[0], BOOT, attempts) == self.model.claim(SITES[0], BOOT, attempts)
        for attempt in attempts:
            if attempt.request in self.model.in_flight:
                self._capture(attempt.request, self.model.engine or ENGINE, False)
        lines = [
            make_line(ordinal, str(sample.state), self.model.reasons[ordinal], sample.live)
            for ordinal, sample in self.model.samples.items()
            if sample.state in (State.FAILED, State.REJECTED)
        ]
        assert self.bus.runs.mark_done(RUN, lines) == self.model.mark_done(lines)
        self._compare()

    # ---- the same thing to both


def check_ttls(bus: Bus) -> None:
    """Every key of ours has a TTL, or a reason in the table why it may live without one."""
    for key in bus.redis.scan_iter("hr:*", count=1000):
        if bus.redis.ttl(key) == -1:
            assert any(fnmatch(key.decode(), pattern) for pattern in keys.WITHOUT_TTL), key


def test_random_lives_agree_with_the_model_and_leave_nothing_behind(bus: Bus) -> None:
    class Machine(BusMachine):
        pass

    Machine.bus = Bus(bus.redis, leases=LONG)
    run_state_machine_as_test(Machine, settings=settings(max_examples=60, stateful_step_count=50))

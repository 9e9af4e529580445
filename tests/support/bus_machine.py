"""How the machine over the bus drives it beside its model, and what it compares after each step."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace

from hypothesis.stateful import RuleBasedStateMachine

from headrace.bus import Bus, keys
from headrace.bus.values import Attempt, Site, Window
from headrace.ids import RequestId
from headrace.lifecycle import State
from headrace.runs import Identity, RunSpec
from headrace_dispatcher.mismatches import MismatchLimit
from headrace_dispatcher.reaper import watch_verdicts
from tests.support.bus_model import BusModel
from tests.support.bus_values import IDENTITY, RUN, make_attempt, make_line

TOTAL = 5
SITES = ("sitea", "siteb")
ENGINE, OTHER = IDENTITY.engine, "engine 2"


@dataclass(slots=True)
class Notes:
    """The two notes of a run's verdicts on first attempts: what the model had counted then."""

    older: Counter[str] = field(default_factory=Counter)
    newer: Counter[str] = field(default_factory=Counter)

    def begin(self, counts: Counter[str]) -> None:
        self.older = self.newer = counts.copy()

    def mark(self, counts: Counter[str], least: int) -> None:
        if counts["first_verdicts"] - self.newer["first_verdicts"] >= least:
            self.older, self.newer = self.newer, counts.copy()

    def window(self, counts: Counter[str]) -> Window:
        new = {name: counts[name] - self.older[name] for name in counts}
        reasons = {n.removeprefix("first_reason:"): count for n, count in new.items() if n.startswith("first_reason:")}
        return Window(
            since=self.older["first_verdicts"],
            verdicts=new.get("first_verdicts", 0),
            mismatches=new.get("first_mismatches", 0),
            reasons={reason: count for reason, count in reasons.items() if count},
        )


class Driven(RuleBasedStateMachine):
    """The bus and the pure model, side by side; the rules are a subclass's."""

    bus: Bus
    model: BusModel
    spec: RunSpec
    names: list[str]
    seen_done: set[int]
    notes: Notes

    def _activate(self) -> None:
        if self.model.state in ("rebuilding", "paused"):
            self.notes.begin(self.model.counts)
        assert self.bus.runs.activate(RUN) == self.model.set_state("active", "rebuilding", "paused")

    def _resume(self) -> None:
        """Somebody pauses the run and lets it go on."""
        assert self.bus.runs.pause(RUN, "why") == self.model.set_state("paused", "active")
        self._activate()

    def _watch_verdicts(self, limit: MismatchLimit, late: bool) -> None:
        """What a reaper does; with `late` it looked when the run had another window."""
        view = self.bus.runs.get(RUN)
        assert view is not None
        since, mismatches = view.window.since - late, view.window.mismatches
        watch_verdicts(self.bus, replace(view, window=replace(view.window, since=since)), limit)
        if mismatches <= limit.share * max(limit.least, view.window.verdicts, mismatches):
            self.notes.mark(self.model.counts, limit.least)
        elif self.model.state == "active" and not late and self.model.can_give_out():
            self.model.state = "paused"

    def _reopen(self, chosen: list[int], twice: bool) -> None:
        before = self.model.state
        expected = self.model.reopen(chosen)
        if self.model.state != before:
            self.notes.begin(self.model.counts)
        for _ in range(1 + twice):
            assert self.bus.runs.reopen(RUN, chosen) == expected

    def _note_failed(self, forgotten: list[int], twice: bool) -> None:
        """An earlier version kept no notes of these failures; the lines of all failed samples bring them back."""
        lines = [
            make_line(ordinal, "failed", reason)
            for ordinal, reason in self.model.failures.items()
            if ordinal in self.model.done
        ]
        for ordinal in forgotten:
            if ordinal in self.model.done and self.model.failures.pop(ordinal, None) is not None:
                self.bus.redis.hdel(keys.failed(RUN), str(ordinal))
        self.model.note_failed(lines)
        for _ in range(1 + twice):
            self.bus.runs.note_failed(RUN, lines)

    def _feed(self, size: int, rejected: list[int], offset: int = 0) -> None:
        entries = ["too_long" if index in rejected else "" for index in range(size)]
        cursor = self.model.cursor + offset
        assert self.bus.runs.feed(RUN, cursor, entries) == self.model.feed(cursor, entries)

    def _attempt(self, ordinal: int, reuse: bool = False) -> Attempt:
        earlier = [name for name in self.names if RequestId.parse(name).ordinal == ordinal]
        if reuse and earlier:
            return replace(make_attempt(ordinal, tokens=2 + ordinal % 4), request=earlier[-1])
        attempt = make_attempt(ordinal, f"{len(self.names):08d}", tokens=2 + ordinal % 4)
        self.names.append(attempt.request)
        return attempt

    def _capture(self, name: str, engine: str, twice: bool) -> None:
        request, site = RequestId.parse(name), self._site(name)
        outcome, job = self.model.capture(name, site, 100 * request.tokens, engine)
        for _ in range(1 + twice):
            identity = Identity(engine=engine, weight_version="w1")
            answer = self.bus.requests.capture(request, site, 100 * request.tokens, identity)
            assert (answer.outcome, answer.job) == (outcome, job)
            if outcome == "captured":
                assert (answer.mask, answer.sample) == ((1, request.tokens - 1), f"s{request.ordinal}")

    def _stored(self, name: str, twice: bool) -> None:
        request, site = RequestId.parse(name), self._site(name)
        assert self.bus.requests.stored(request, site, 11) == self.model.stored(name, 11)
        if twice:
            assert self.bus.requests.stored(request, site, 11) == "again"

    def _register(self, site: Site) -> None:
        self.bus.sites.register(site, ttl=3600)
        self.model.register(site)

    def _lapse(self, kind: str, name: str) -> None:
        """Set the lease's end into the past, as if its time had gone by."""
        self.model.lapse(kind, name)
        match kind:
            case "in_flight":
                self.bus.redis.zadd(keys.in_flight(RUN), {name: 1})
                if name in self.model.credits:
                    site, tokens, nbytes = self.model.credits[name]
                    self.bus.redis.hset(keys.credits(site), name, f"{tokens} {nbytes} 1")
            case "captured":
                self.bus.redis.zadd(keys.captured(self.model.captured[name]), {name: 1})
            case "storing":
                self.bus.redis.zadd(keys.storing(self.model.storing[name]), {name: 1})
            case _:
                self.bus.redis.zadd(keys.recording(RUN), {name: 1})

    def _reap_run(self) -> None:
        ended, records = self.bus.requests.reap_run(RUN)
        found = (
            [(entry.request, entry.outcome, entry.reason) for entry in ended],
            sorted((entry.ordinal, str(entry.status), entry.reason, entry.request) for entry in records),
        )
        assert found == self.model.reap_run()

    def _reap_site(self, site: str) -> None:
        ended, jobs = self.bus.requests.reap_site(site)
        assert (ended, [(job.request, job.job) for job in jobs]) == self.model.reap_site(site)
        for job in jobs:
            tokens = job.id.tokens
            assert (job.sample, job.mask) == (f"s{job.id.ordinal}", (1, tokens - 1))
            assert (job.engine, job.weight_version) == (self.model.engine, "w1")

    def _name(self, pick: int, among: dict[str, str] | None = None) -> str:
        names = sorted(among) if among else self.names
        return names[pick % len(names)]

    def _site(self, name: str) -> str:
        known = self.model.requests.get(name)
        return known.site if known is not None else SITES[0]

    # ---- invariants

    def _compare(self) -> None:
        model, client = self.model, self.bus.redis
        pipe = client.pipeline()
        pipe.hgetall(keys.opened(RUN))
        pipe.lrange(keys.pending(RUN), 0, -1)
        for key in (keys.in_flight(RUN), keys.recording(RUN)):
            pipe.zrange(key, 0, -1, withscores=True)
        for site in SITES:
            pipe.hgetall(keys.credits(site))
            pipe.zrange(keys.captured(site), 0, -1, withscores=True)
            pipe.zrange(keys.storing(site), 0, -1, withscores=True)
        opened, pending, in_flight, recording, *sites = pipe.execute()

        found = {int(ordinal): value.decode().split("|") for ordinal, value in opened.items()}
        expected = {
            ordinal: [str(sample.state), str(sample.attempts), sample.live, sample.captured, str(sample.job)]
            for ordinal, sample in model.samples.items()
        }
        assert {ordinal: fields[:5] for ordinal, fields in found.items()} == expected
        waiting = [int(ordinal) for ordinal in pending]
        assert waiting == model.pending
        assert sorted(waiting) == sorted(o for o, s in model.samples.items() if s.state is State.PENDING)
        assert self._leases("in_flight", in_flight) == set(model.in_flight)
        assert self._leases("recording", recording) == {str(ordinal) for ordinal in model.recording}
        for index, site in enumerate(SITES):
            credits, captured, storing = sites[3 * index : 3 * index + 3]
            held = {n.decode(): tuple(map(int, r.split()))[:2] for n, r in credits.items()}
            assert held == {n: (t, b) for n, (where, t, b) in model.credits.items() if where == site}
            assert self._leases("captured", captured) == {n for n, where in model.captured.items() if where == site}
            assert self._leases("storing", storing) == {n for n, where in model.storing.items() if where == site}
            registration = self.bus.sites.get(site)
            assert (registration.dump_bytes if registration else None) == model.dump_bytes.get(site)
            if registration is not None:
                assert self.bus.sites.load(registration) == model.load(site)
        self._invariants()
        self._counts()

    def _leases(self, kind: str, entries: list[tuple[bytes, float]]) -> set[str]:
        for name, till in entries:
            assert ((kind, name.decode()) in self.model.lapsed) == (till <= 1), (kind, name, till)
        return {name.decode() for name, _ in entries}

    def _invariants(self) -> None:
        """What must hold whatever the model says."""
        model = self.model
        assert set(model.credits) <= set(model.in_flight), "a credit without a lease"
        for name in model.in_flight:
            assert name in model.credits or ("in_flight", name) in model.lapsed, "a live lease without a credit"
        captured = {sample.captured for sample in model.samples.values() if sample.state is State.CAPTURED}
        assert captured == set(model.captured) == set(model.storing)
        for sample in model.samples.values():
            if sample.state is State.IN_FLIGHT:
                assert sample.live in model.in_flight, "a sample that nothing would ever end"
        ended = {o for o, s in model.samples.items() if s.state in (State.FAILED, State.REJECTED)}
        assert ended == model.recording
        assert self.seen_done - set(model.failures) <= set(model.done), "done is for good, but by a failure"
        assert not set(model.samples) & set(model.done)
        self.seen_done = set(model.done)

    def _counts(self) -> None:
        model, view = self.model, self.bus.runs.get(RUN)
        assert view is not None
        assert (view.state, view.cursor) == (model.state, model.cursor)
        assert (view.stored, view.rejected, view.failed) == tuple(
            model.counts[status] for status in ("stored", "rejected", "failed")
        )
        assert view.stored + view.rejected + view.failed + view.open == TOTAL
        assert view.open == TOTAL - len(model.done)
        bits = {o for o in range(TOTAL) if self.bus.redis.getbit(keys.done(RUN), o)}
        assert bits == set(model.done)
        noted = self.bus.redis.hgetall(keys.failed(RUN))
        assert model.failures == {int(ordinal): reason.decode() for ordinal, reason in noted.items()}
        spared = {int(ordinal): int(n) for ordinal, n in self.bus.redis.hgetall(keys.spared(RUN)).items()}
        assert spared == model.spared
        assert spared.keys() <= model.samples.keys()
        reasons = {n.removeprefix("failed:"): count for n, count in model.counts.items() if n.startswith("failed:")}
        assert view.failed_by == {reason: count for reason, count in reasons.items() if count}
        assert (view.tokens, view.bytes) == (model.counts["tokens"], model.counts["bytes"])
        assert (view.verdicts, view.mismatches) == (model.counts["verdicts"], model.counts["mismatches"])
        assert view.mismatches <= view.verdicts
        assert view.window == self.notes.window(model.counts)
        counted = {name.removeprefix("reason:"): n for name, n in model.counts.items() if name.startswith("reason:")}
        assert view.reasons == counted
        assert (view.state == "finished") == (view.finished_at is not None)
        assert self.bus.runs.dead(RUN) == model.dead[::-1][:100]
        remembered = {key.decode().removeprefix("hr:req:") for key in self.bus.redis.scan_iter("hr:req:*", count=1000)}
        assert remembered == set(model.requests)
        marked = {name for name in model.requests if self.bus.redis.hexists(keys.request(name), "beside_others")}
        assert marked == {name for name, known in model.requests.items() if known.beside_others}

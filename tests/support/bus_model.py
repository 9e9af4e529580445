"""A second, plain spelling of what the bus's scripts do, over the pure life of a sample: tests compare the two."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from headrace.bus.values import Attempt, Site
from headrace.flow import Load, room
from headrace.ids import RequestId
from headrace.lifecycle import Sample, State
from headrace.manifest import Line


@dataclass(slots=True)
class Request:
    """What Redis remembers of one attempt."""

    ordinal: int
    site: str
    tokens: int
    dump_bytes: int
    outcome: str = ""
    k: int = 0
    answered: bool = False
    judged: bool = False
    refused: bool = False
    duplicate: bool = False


@dataclass(slots=True)
class BusModel:
    """One run over several sites. Leases are sets: `lapsed` holds (kind, name) whose end has passed."""

    run: str
    total: int
    max_attempts: int
    state: str = "rebuilding"
    cursor: int = 0
    samples: dict[int, Sample] = field(default_factory=dict)
    reasons: dict[int, str] = field(default_factory=dict)
    pending: list[int] = field(default_factory=list)
    done: dict[int, str] = field(default_factory=dict)
    failures: dict[int, str] = field(default_factory=dict)  # ordinal -> reason; one that is not done was reopened
    requests: dict[str, Request] = field(default_factory=dict)
    in_flight: dict[str, str] = field(default_factory=dict)  # request -> site
    credits: dict[str, tuple[str, int, int]] = field(default_factory=dict)  # request -> site, tokens, bytes
    captured: dict[str, str] = field(default_factory=dict)  # request -> site
    storing: dict[str, str] = field(default_factory=dict)  # request -> site
    recording: set[int] = field(default_factory=set)
    lapsed: set[tuple[str, str]] = field(default_factory=set)
    registered: dict[str, Site] = field(default_factory=dict)
    known_sites: set[str] = field(default_factory=set)
    dump_bytes: dict[str, int] = field(default_factory=dict)
    counts: Counter[str] = field(default_factory=Counter)
    dead: list[tuple[str, int, str]] = field(default_factory=list)
    engine: str = ""

    # ---- runs

    def create(self) -> str:
        if self.state == "cancelled":
            self.state = "rebuilding"
        return "same"

    def set_state(self, state: str, *allowed: str) -> str:
        if self.state in allowed:
            self.state = state
            if state == "active":
                self._check_finished()
        return self.state

    def feed(self, cursor: int, entries: list[str]) -> int | None:
        if self.state != "active" or cursor != self.cursor:
            return None
        reached = min(cursor + len(entries), self.total)
        for ordinal, reason in zip(range(cursor, reached), entries, strict=False):
            if ordinal in self.done or ordinal in self.samples:
                continue
            self.samples[ordinal] = Sample()
            if reason:
                self._reject(ordinal, reason)
            else:
                self.pending.append(ordinal)
        self.cursor = next((ordinal for ordinal in range(reached, self.total) if ordinal not in self.done), self.total)
        self._check_finished()
        return self.cursor

    def mark_done(self, lines: list[Line]) -> int:
        new = sum([self._finish(line.ordinal, line.status, line.tokens, line.bytes, line) for line in lines])
        self._check_finished()
        return new

    def reopen(self, lines: list[Line]) -> list[int]:
        failed = [line.ordinal for line in lines if line.ordinal in self.failures]
        for ordinal in failed:
            if self.done.pop(ordinal, None) is not None:
                self.counts.subtract(("failed", f"failed:{self.failures[ordinal]}"))
                self.cursor = min(self.cursor, ordinal)
                self.state = "active" if self.state == "finished" else self.state
        return failed

    def reject(self, ordinal: int, reason: str) -> bool:
        sample = self.samples.get(ordinal)
        if sample is not None and sample.state is State.REJECTED and self.reasons[ordinal] == reason:
            return True
        if sample is None or sample.state is not State.PENDING:
            return False
        self.pending.remove(ordinal)
        self._reject(ordinal, reason)
        return True

    # ---- requests

    def claim(self, site: str, boot: str, attempts: list[Attempt]) -> list[str]:
        if self.state != "active":
            return [self.state] * len(attempts)
        registration = self.registered.get(site)
        if registration is None or registration.boot != boot:
            return ["gone"] * len(attempts)
        return [self._claim(registration, attempt) for attempt in attempts]

    def _claim(self, site: Site, attempt: Attempt) -> str:
        sample = self.samples.get(attempt.ordinal)
        if sample is not None and sample.state is State.IN_FLIGHT and sample.live == attempt.request:
            return "claimed"
        if sample is None or sample.state is not State.PENDING or attempt.request in self.requests:
            return "taken"
        if not room(site.caps, self.load(site.site)).fits(attempt.tokens, attempt.dump_bytes):
            return "full"
        self.samples[attempt.ordinal] = sample.claim(attempt.request)
        self.pending.remove(attempt.ordinal)
        self.requests[attempt.request] = Request(attempt.ordinal, site.site, attempt.tokens, attempt.dump_bytes)
        self.in_flight[attempt.request] = site.site
        self.credits[attempt.request] = (site.site, attempt.tokens, attempt.dump_bytes)
        return "claimed"

    def load(self, site: str) -> Load:
        held = [(tokens, nbytes) for where, tokens, nbytes in self.credits.values() if where == site]
        return Load(
            requests=len(held),
            tokens=sum(tokens for tokens, _ in held),
            promised_bytes=sum(nbytes for _, nbytes in held),
            measured_bytes=self.dump_bytes.get(site, 0),
        )

    def lease(self, requests: list[str], *, answered: bool) -> list[str]:
        for name in requests:
            if name not in self.in_flight:
                continue
            known = self.requests[name]
            self.credits[name] = (known.site, known.tokens, known.dump_bytes)
            known.answered = known.answered or answered
            self.lapsed.discard(("in_flight", name))
        return [name for name in requests if name not in self.in_flight]

    def end(self, name: str, *, burn: bool, kind: str, reason: str, unless_captured: bool = False) -> str:
        ordinal = RequestId.parse(name).ordinal
        known, sample = self.requests.get(name), self.samples.get(ordinal)
        if known is None:
            return "unknown"
        if unless_captured and name in self.captured:
            return "captured"
        if kind == "mismatch" and not known.refused:
            known.refused = True
            self.counts["verdicts"] += not known.judged
            known.judged = True
            self.counts["mismatches"] += 1
            self.counts[f"reason:{reason}"] += 1
        if known.outcome:
            return known.outcome
        self._release(name)
        live = sample is not None and sample.state is State.IN_FLIGHT and sample.live == name
        captured = sample is not None and sample.state is State.CAPTURED and sample.captured == name
        known.outcome = "stale"
        if sample is not None and (live or captured):
            if burn or captured:
                self.dead.append((name, sample.attempts, reason))
            ended = sample.end_attempt(burn=burn, max_attempts=self.max_attempts)
            self.samples[ordinal] = ended
            if ended.state is State.FAILED:
                self.recording.add(ordinal)
                self.reasons[ordinal] = reason
                self.lapsed.add(("recording", str(ordinal)))
            else:
                self.pending.append(ordinal)
            known.outcome = str(ended.state)
        if kind != "mismatch":
            self.counts[f"reason:{reason}"] += 1
        return known.outcome

    def capture(self, name: str, site: str, dump_bytes: int, engine: str) -> tuple[str, int]:
        ordinal = RequestId.parse(name).ordinal
        known, sample = self.requests.get(name), self.samples.get(ordinal)
        if ordinal in self.done:
            self._release(name)
            self.requests.pop(name, None)
            return "done", 0
        if known is None or sample is None:
            return "unknown_request", 0
        if sample.state is State.CAPTURED:
            if sample.captured == name:
                return "captured", sample.job
            self._release(name)
            self.counts["reason:duplicate"] += not known.duplicate
            known.duplicate = True
            known.outcome = "stale"
            return "duplicate", 0
        if sample.state in (State.FAILED, State.REJECTED):
            self._release(name)
            return "closed", 0
        if self.engine and self.engine != engine:
            return "identity", 0
        self.engine = engine
        if sample.state is State.PENDING:
            self.pending.remove(ordinal)
        self._release(name)
        known.k += 1
        self.samples[ordinal] = sample.capture(name, known.k)
        if site in self.registered:
            self.dump_bytes[site] += dump_bytes
        self.captured[name] = self.storing[name] = known.site = site
        known.outcome = ""
        self.counts["verdicts"] += not known.judged
        known.judged = True
        self.known_sites.add(site)
        return "captured", known.k

    def hold(self, site: str, dumps: list[str], queued: list[str]) -> list[str]:
        for name in dumps:
            if self.captured.get(name) == site:
                self.lapsed.discard(("captured", name))
        for name in queued:
            if self.storing.get(name) == site:
                self.lapsed.discard(("storing", name))
        return [name for name in dumps if self.captured.get(name) != site]

    def begin_store(self, name: str, job: int, site: str) -> str:
        ordinal = RequestId.parse(name).ordinal
        sample = self.samples.get(ordinal)
        if ordinal in self.done:
            return "done"
        if sample is None or sample.state is not State.CAPTURED or sample.captured != name or sample.job != job:
            return "stale"
        self.storing[name] = site
        self.lapsed.discard(("storing", name))
        return "go"

    def stored(self, name: str, nbytes: int) -> str:
        request = RequestId.parse(name)
        new = self._finish(request.ordinal, "stored", request.tokens, nbytes)
        self._release(name)
        self.requests.pop(name, None)
        self._check_finished()
        return "stored" if new else "again"

    # ---- the reaper and the sites

    def lapse(self, kind: str, name: str) -> None:
        self.lapsed.add((kind, name))

    def reap_run(self) -> tuple[list[tuple[str, str, str]], list[tuple[int, str, str, str]]]:
        ended = []
        for name in sorted(name for name in self.in_flight if ("in_flight", name) in self.lapsed):
            reason = "no_dump" if self.requests[name].answered else "lapsed"
            ended.append((name, self.end(name, burn=True, kind="error", reason=reason), reason))
        records = []
        for ordinal in sorted(self.recording):
            if ("recording", str(ordinal)) in self.lapsed:
                self.lapsed.discard(("recording", str(ordinal)))
                sample = self.samples[ordinal]
                records.append((ordinal, str(sample.state), self.reasons[ordinal], sample.live))
        return ended, records

    def reap_site(self, site: str) -> tuple[list[str], list[tuple[str, int]]]:
        ended = sorted(n for n, where in self.captured.items() if where == site and ("captured", n) in self.lapsed)
        for name in ended:
            self.end(name, burn=True, kind="error", reason="dump_gone")
        jobs = []
        for name in sorted(n for n, where in self.storing.items() if where == site and ("storing", n) in self.lapsed):
            known = self.requests[name]
            known.k += 1
            sample = self.samples[known.ordinal].reopen_job()
            self.samples[known.ordinal] = sample
            self.lapsed.discard(("storing", name))
            jobs.append((name, sample.job))
        for name in [n for n, (where, _, _) in self.credits.items() if where == site]:
            if ("in_flight", name) in self.lapsed:
                del self.credits[name]
        return ended, jobs

    def register(self, site: Site) -> None:
        self.registered[site.site] = site
        self.known_sites.add(site.site)
        self.dump_bytes[site.site] = site.dump_bytes

    def unregister(self, site: str) -> None:
        self.registered.pop(site, None)
        self.dump_bytes.pop(site, None)

    def evict(self, site: str) -> bool:
        held = [where for where, _, _ in self.credits.values()] + list(self.captured.values())
        if site in self.registered or site in held or site not in self.known_sites:
            return False
        self.known_sites.discard(site)
        return True

    # ---- shared

    def _reject(self, ordinal: int, reason: str) -> None:
        self.samples[ordinal] = self.samples[ordinal].reject()
        self.reasons[ordinal] = reason
        self.recording.add(ordinal)
        self.lapsed.add(("recording", str(ordinal)))

    def _release(self, name: str) -> None:
        for leases in (self.in_flight, self.credits, self.captured, self.storing):
            leases.pop(name, None)
        self.lapsed -= {(kind, name) for kind in ("in_flight", "captured", "storing")}

    def _finish(self, ordinal: int, status: str, tokens: int, nbytes: int, line: Line | None = None) -> bool:
        sample, reason, request = self.samples.get(ordinal), *((line.reason, line.request) if line else ("", ""))
        newest = sample is not None and (sample.state, sample.live) == (State.FAILED, request)
        stale = status == "failed" and ordinal in self.failures and not newest
        if not 0 <= ordinal < self.total or ordinal in self.done or stale:
            return False
        self.failures.pop(ordinal, None)
        if status == "failed":
            self.failures[ordinal] = reason
        self.done[ordinal] = status
        self.counts[status] += 1
        if status == "stored":
            self.counts["tokens"] += tokens
            self.counts["bytes"] += nbytes
        else:
            self.counts[f"{status}:{reason}"] += 1
        if sample is not None:
            del self.samples[ordinal]
            if sample.state is State.PENDING:
                self.pending.remove(ordinal)
            if sample.captured:
                self._release(sample.captured)
                self.requests.pop(sample.captured, None)
        self.recording.discard(ordinal)
        self.lapsed.discard(("recording", str(ordinal)))
        return True

    def _check_finished(self) -> None:
        if len(self.done) >= self.total and self.state != "cancelled":
            self.state = "finished"

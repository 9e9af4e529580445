"""The state of the plain model of the bus, and its part about a run as a whole."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from headrace.bus.values import Site
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
    beside_others: bool = False
    first: bool = False  # of a sample that never failed


@dataclass(slots=True)
class RunModel:
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
    spared: Counter[int] = field(default_factory=Counter)  # of open samples
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

    def reopen(self, ordinals: list[int]) -> dict[int, str]:
        for ordinal in ordinals:
            sample = self.samples.get(ordinal)
            if sample is not None and sample.state is State.FAILED:
                self.samples[ordinal] = sample.reopen()
                self.failures[ordinal] = self.reasons[ordinal]
                self.pending.append(ordinal)
                self._recorded(ordinal)
                del self.spared[ordinal]
            if ordinal in self.failures and self.done.pop(ordinal, None) is not None:
                self._uncount_failure(ordinal)
                self.cursor = min(self.cursor, ordinal)
                self.state = "active" if self.state == "finished" else self.state
        return {ordinal: self.failures[ordinal] for ordinal in ordinals if ordinal in self.failures}

    def note_failed(self, lines: list[Line]) -> None:
        unknown = self.counts["failed"] - len(self.failures.keys() & self.done.keys())
        for line in lines:
            if unknown and line.ordinal in self.done and line.ordinal not in self.failures:
                self.failures[line.ordinal] = line.reason
                unknown -= 1

    def can_give_out(self) -> bool:
        """Whether a sample waits for a claim, or was not fed yet."""
        return bool(self.pending) or any(o not in self.done and o not in self.samples for o in range(self.total))

    def reject(self, ordinal: int, reason: str) -> bool:
        sample = self.samples.get(ordinal)
        if sample is not None and sample.state is State.REJECTED and self.reasons[ordinal] == reason:
            return True
        if sample is None or sample.state is not State.PENDING:
            return False
        self.pending.remove(ordinal)
        self._reject(ordinal, reason)
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
        given_up = ordinal in self.done and ordinal in self.failures
        if not 0 <= ordinal < self.total or (ordinal in self.done and not given_up) or stale:
            return False
        if given_up:
            self._uncount_failure(ordinal)
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
            del self.samples[ordinal], self.spared[ordinal]
            if sample.state is State.PENDING:
                self.pending.remove(ordinal)
            if sample.captured:
                self._release(sample.captured)
                self.requests.pop(sample.captured, None)
        self._recorded(ordinal)
        return True

    def _recorded(self, ordinal: int) -> None:
        self.recording.discard(ordinal)
        self.lapsed.discard(("recording", str(ordinal)))

    def _uncount_failure(self, ordinal: int) -> None:
        self.counts.subtract(("failed", f"failed:{self.failures[ordinal]}"))

    def _check_finished(self) -> None:
        if len(self.done) >= self.total and self.state != "cancelled":
            self.state = "finished"

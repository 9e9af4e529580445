"""A second, plain spelling of what the bus's scripts do, over the pure life of a sample: tests compare the two."""

from __future__ import annotations

from headrace.bus.values import Attempt, Burn, Site
from headrace.flow import Load, room
from headrace.ids import RequestId
from headrace.lifecycle import State
from tests.support.bus_model_runs import Request, RunModel


class BusModel(RunModel):
    """One run over several sites: what concerns single attempts, the reaper and the sites."""

    __slots__ = ()

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
        first = sample.attempts == 0 and attempt.ordinal not in self.failures
        self.samples[attempt.ordinal] = sample.claim(attempt.request)
        self.pending.remove(attempt.ordinal)
        self.requests[attempt.request] = Request(
            attempt.ordinal, site.site, attempt.tokens, attempt.dump_bytes, first=first
        )
        self.in_flight[attempt.request] = site.site
        self._hold_credit(attempt.request)
        return "claimed"

    def _hold_credit(self, name: str) -> None:
        """Whoever holds a credit of a site together with another one is marked for it."""
        known = self.requests[name]
        self.credits[name] = (known.site, known.tokens, known.dump_bytes)
        held = [other for other, (where, _, _) in self.credits.items() if where == known.site]
        if len(held) > 1:
            for other in held:
                self.requests[other].beside_others = True

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
            self._hold_credit(name)
            known.answered = known.answered or answered
            self.lapsed.discard(("in_flight", name))
        return [name for name in requests if name not in self.in_flight]

    def end(
        self, name: str, *, burn: Burn, kind: str, reason: str, unless_captured: bool = False, counted: bool = False
    ) -> str:
        ordinal = RequestId.parse(name).ordinal
        known, sample = self.requests.get(name), self.samples.get(ordinal)
        if known is None:
            return "unknown"
        if unless_captured and name in self.captured:
            return "captured"
        if kind == "mismatch" and not known.refused:
            known.refused = True
            self._judged(known)
            self.counts["mismatches"] += 1
            self.counts[f"reason:{reason}"] += 1
            if known.first:
                self.counts.update(("first_mismatches", f"first_reason:{reason}"))
        if known.outcome:
            return known.outcome
        alone = name in self.credits and not known.beside_others
        burns = alone if burn == "if_alone" else bool(burn)
        self._release(name)
        live = sample is not None and sample.state is State.IN_FLIGHT and sample.live == name
        captured = sample is not None and sample.state is State.CAPTURED and sample.captured == name
        known.outcome = "stale"
        if sample is not None and (live or captured):
            if live and counted and not burns:
                burns = self._spare(ordinal)
            if burns or captured:
                self.dead.append((name, sample.attempts, reason))
            ended = sample.end_attempt(burn=burns, max_attempts=self.max_attempts)
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

    def _spare(self, ordinal: int) -> bool:
        """Of what costs a sample nothing each fifth costs an attempt all the same."""
        self.spared[ordinal] += 1
        if self.spared[ordinal] < 5:
            return False
        del self.spared[ordinal]
        return True

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
        self._judged(known)
        self.known_sites.add(site)
        return "captured", known.k

    def _judged(self, known: Request) -> None:
        if not known.judged:
            known.judged = True
            self.counts["verdicts"] += 1
            self.counts["first_verdicts"] += known.first

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

"""Brings an engine to its registration: reads its card, asks its health, sends the canary and judges what comes."""

from __future__ import annotations

import secrets
from dataclasses import replace

from headrace import logs
from headrace.bus.values import Site
from headrace.dumpfolder import read_card, read_dump, read_lost, read_problem
from headrace.dumps import DUMP_SUFFIX, ENGINE_FILE, PROBLEM_FILE, EngineCard
from headrace.errors import Unreadable
from headrace.finalnorm import declared_norm
from headrace.settings import Settings
from headrace.verdicts import Reason
from headrace_watcher.canary import Canary, explain
from headrace_watcher.engine import EngineClient, Health, Limits
from headrace_watcher.folder import DumpFolder, Entry, Listing, Stamp
from headrace_watcher.registration import Registration, State

log = logs.get(__name__)

# For an engine that does not tell its limit: over-long prompts are then refused by the engine, one attempt each.
UNKNOWN_LIMIT = 1 << 20
_LONGEST_PROBLEM = 1900  # characters: for logs, readiness and Redis


class Admission:
    """Drives one engine's `Registration`; needs no Redis. Times are monotonic seconds, given by the caller."""

    def __init__(self, folder: DumpFolder, client: EngineClient, settings: Settings) -> None:
        """Prove the engine that fills this folder."""
        self.registration = Registration()
        self._folder = folder
        self._client = client
        self._settings = settings
        self._incarnation = secrets.token_hex(8)
        self._stamps: tuple[Stamp | None, Stamp | None] = (None, None)
        self._canary: Canary | None = None
        self._longest_prompt = UNKNOWN_LIMIT
        self._next_check = 0.0

    def step(self, listing: Listing, now: float) -> None:
        """Take in what happened, and ask for what is missing."""
        self._read_answers(now)
        self._read_card(listing)
        for entry in (*listing.dumps, *listing.notices):
            if entry.request.is_canary:
                self._take(entry, now)
        if self._canary is not None and now >= self._canary.deadline:
            self._conclude(self._canary.overdue(str(self._folder.path)), now)
        if now >= self._next_check and self.registration.card is not None:
            self._next_check = now + self._settings.heartbeat_seconds
            self._client.check_health()
        card = self.registration.card
        if card is not None and self._canary is None and self.registration.may_send(now):
            timeout = self._settings.canary_timeout_seconds
            self._canary = Canary.make(card, now + timeout, secrets.randbelow)
            log.info("canary sent", request=str(self._canary.request), engine=self._settings.engine_url)
            self._client.post_canary(self._canary.request, self._canary.token_ids, timeout)

    def site(self, card: EngineCard, dump_bytes: int) -> Site:
        """The registration of an engine with this card, the folder holding so many bytes."""
        settings = self._settings
        size, free = self._folder.capacity()
        # A tmpfs that is smaller than the cap is the cap; what others fill of it counts as filled.
        cap = min(settings.dump_cap_bytes, size)
        return Site(
            site=self._folder.site,
            url=settings.engine_url,
            boot=card.boot,
            incarnation=self._incarnation,
            model=card.model,
            boundaries=card.boundaries,
            final_state=card.final_state,
            hidden_size=card.hidden_size,
            dtype=card.dtype,
            fingerprint=card.fingerprint,
            weight_version=card.weight_version,
            final_norm=bool(card.norm_file) and declared_norm(card.fingerprint) is not None,
            context_length=self._longest_prompt,
            max_requests=settings.max_requests,
            max_tokens=settings.max_tokens,
            dump_cap_bytes=cap,
            dump_bytes=max(dump_bytes, cap - free),
        )

    def _read_answers(self, now: float) -> None:
        for answer in self._client.answers():
            if isinstance(answer, Health):
                self._become(self.registration.see_health(answer.problem))
            elif isinstance(answer, Limits):
                if answer.longest_prompt is None:
                    log.warning("the engine does not tell its longest prompt", assumed=UNKNOWN_LIMIT)
                self._longest_prompt = answer.longest_prompt or UNKNOWN_LIMIT
            elif self._canary is not None and answer.request == self._canary.request:
                if answer.problem:
                    self._conclude(answer.problem, now)
                else:
                    self._canary = replace(self._canary, answered=True)

    def _read_card(self, listing: Listing) -> None:
        stamps = (listing.card, listing.problem)
        if stamps == self._stamps:
            return
        self._stamps = stamps
        try:
            card = read_card(self._folder.path / ENGINE_FILE)
        except FileNotFoundError:
            problem = self._read_problem()
            if problem:
                log.warning("not registered", problem=problem)
            self._become(self.registration.see_card(None, problem))
        except Unreadable as error:
            self._become(self.registration.see_card(None, f"the engine's card cannot be read: {error}"))
        else:
            self._become(self.registration.see_card(card))

    def _read_problem(self) -> str:
        """Why the engine publishes no card, in its own words; empty where it says nothing."""
        try:
            problem = read_problem(self._folder.path / PROBLEM_FILE).problem
            said = problem if len(problem) <= _LONGEST_PROBLEM else f"{problem[:_LONGEST_PROBLEM]}…"
            return f"the engine captures nothing: {said or 'it does not say why; see its log'}"
        except FileNotFoundError:
            return ""
        except Unreadable as error:
            return f"the engine captures nothing, and why cannot be read: {error}"

    def _take(self, entry: Entry, now: float) -> None:
        """Judge a canary's file, and remove it whosever it is: no canary outlives its watcher."""
        path = self._folder.path / entry.name
        if self._canary is not None and entry.request == self._canary.request:
            self._conclude(self._judge(entry, self._canary), now)
        try:
            path.unlink(missing_ok=True)
        except OSError as error:
            self._become(replace(self.registration, canary=f"{path} cannot be removed: {error.strerror}"))

    def _judge(self, entry: Entry, canary: Canary) -> str:
        path = self._folder.path / entry.name
        try:
            if not entry.name.endswith(DUMP_SUFFIX):
                lost = read_lost(path)
                return explain(lost.reason, lost.detail)
            refusal = canary.judge(read_dump(path))
        except Unreadable as error:
            return explain(Reason.UNREADABLE, str(error))
        except FileNotFoundError:
            return "the canary's dump was taken away by somebody else; does another watcher serve this folder?"
        return explain(refusal.reason, refusal.detail) if refusal is not None else ""

    def _conclude(self, problem: str, now: float) -> None:
        self._canary = None
        if problem:
            self._become(self.registration.unproven(problem, now))
            wait = round(self.registration.not_before - now, 1)
            log.warning("not registered", problem=problem, next_try_seconds=wait)
        else:
            self._become(self.registration.proven())

    def _become(self, registration: Registration) -> None:
        before, self.registration = self.registration, registration
        if registration.state is before.state and registration.card == before.card:
            return
        if registration.state is not State.PROVING:
            self._canary = None  # its life of the engine is over; what still comes of it is removed
        log.info("engine state", state=registration.state, before=before.state, why=registration.engine)

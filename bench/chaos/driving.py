"""Strikes a running fleet, fault by fault, as rows are stored, and sees how long it takes to recover."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from bench.chaos.fleet import Fleet
from bench.chaos.schedule import Fault, twin
from headrace.bus import Bus
from headrace.errors import HeadraceError, Unavailable
from headrace.manifest import Line, ManifestReader

_TICK_SECONDS = 0.03
_PROBE_SECONDS = 0.15
_STALLED_SECONDS = 15.0  # without a row, while every process runs
_STRUCK_PART = 0.85  # of the rows are stored when the last fault comes, so that it meets open samples
_URGENT_PART = 0.07  # of the rows are left: a fault that waited any longer might find no open sample
_BEFORE_SET_BACK = 10  # rows that are stored between the copy and the setting back, if they come in time
_MOST_DEAD = 10_000
_MOST_ENDS = 3  # of one process by itself, after which it is not started again


@dataclass(slots=True, kw_only=True)
class Strike:
    """One fault that was made. Times are seconds since the run began; `rows` were stored when it last changed."""

    fault: Fault
    at: float
    due: float
    rows: int
    back: float | None = None
    ready: float | None = None
    recovered: float | None = None
    probed: float = 0.0

    def see(self, now: float, *, ready: bool, stored: int) -> None:
        """Take a look at the process that is back: it recovered when it was ready and a row was stored after that."""
        if self.ready is None:
            if ready:
                self.ready, self.rows = now, stored
        elif stored > self.rows:
            self.recovered = now

    @property
    def away(self) -> float:
        """Seconds that the process was away; a Redis that is set back is started again at once."""
        return 0.0 if self.fault.kind == "set back" or self.back is None else self.back - self.at

    @property
    def to_recover(self) -> float | None:
        """Seconds from the process's return until it recovered; None where it was struck again, or all ended, first."""
        return None if self.recovered is None or self.back is None else self.recovered - self.back


@dataclass(slots=True, kw_only=True)
class Course:
    """What happened: strikes, processes that ended by themselves, burnt attempts, and whether all was stored."""

    strikes: list[Strike] = field(default_factory=list)
    unmade: int = 0
    ended: list[str] = field(default_factory=list)
    resubmitted: int = 0
    burnt: set[tuple[str, int, str]] = field(default_factory=set)
    finished: bool = False
    seconds: float = 0.0

    @property
    def broken_off(self) -> int:
        """Storage jobs that may have been broken off, at most: a writer runs one at a time, and there are two."""
        processes = [strike.fault.process for strike in self.strikes]
        return sum(2 if process == "redis" else process.startswith("writer") for process in processes)

    @property
    def burnt_by_reason(self) -> Counter[str]:
        """Attempts burnt, by reason; Redis forgot some of them, this does not."""
        return Counter(reason for _, _, reason in self.burnt)


class Progress:
    """How many samples have a stored line, read from the manifest, which needs no Redis."""

    def __init__(self, output: Path) -> None:
        """Follow this dataset's folder."""
        self._reader = ManifestReader(output)
        self._ordinals: set[int] = set()

    def stored(self) -> int:
        """Samples with a stored line now."""
        for line in self._reader.read_new():
            if isinstance(line, Line) and line.status == "stored":
                self._ordinals.add(line.ordinal)
        return len(self._ordinals)


class Driver:
    """Makes every fault of a schedule, the next one when its share of the rows is stored and the run has recovered."""

    def __init__(
        self,
        fleet: Fleet,
        bus: Bus,
        run: str,
        total: int,
        output: Path,
        faults: Sequence[Fault],
        submit_again: Callable[[], object],
    ) -> None:
        """`submit_again` is what a user does about a run that Redis lost and no dispatcher remembers."""
        self._fleet = fleet
        self._bus = bus
        self._run = run
        self._total = total
        self._earlier = output.parent / "earlier-redis"
        self._progress = Progress(output)
        self._faults = list(faults)
        self._submit_again = submit_again
        self._open: list[Strike] = []
        self._ends = Counter[str]()
        self._stored = 0
        self._last_row = 0.0
        self._began = time.monotonic()
        self.course = Course()

    def drive(self, limit: float) -> Course:
        """Go on until every sample is stored and every process is back, for `limit` seconds at most.

        Raises:
            Unavailable: one process ended by itself again and again.
        """
        course = self.course
        while True:
            now = time.monotonic() - self._began
            self._look(now)
            self._bring_back(now)
            self._recover(now)
            self._restart_ended(now)
            done = self._stored >= self._total and all(strike.back is not None for strike in self._open)
            if done or now > limit:
                break
            if self._due(now):
                self._strike(self._faults[len(course.strikes)], now)
            if now - self._last_row > _STALLED_SECONDS and not self._away():
                self._unstall(now)
            time.sleep(_TICK_SECONDS)
        course.finished = self._stored >= self._total
        course.unmade = len(self._faults) - len(course.strikes)
        course.seconds = time.monotonic() - self._began
        for strike in self._open:  # the limit came first
            if strike.back is None:
                self._return(strike, course.seconds)
        return course

    def note_burnt(self) -> None:
        """Remember the attempts that Redis says are burnt, before it may forget them."""
        try:
            self.course.burnt.update(self._bus.runs.dead(self._run, _MOST_DEAD))
        except HeadraceError:
            pass  # it is away

    def _look(self, now: float) -> None:
        stored = self._progress.stored()
        if stored > self._stored:
            self._stored, self._last_row = stored, now

    def _away(self) -> set[str]:
        """Processes that are down, or about to be set back."""
        return {strike.fault.process for strike in self._open if strike.back is None}

    def _due(self, now: float) -> bool:
        made = len(self.course.strikes)
        if made == len(self._faults) or self._stored < max(1.0, _STRUCK_PART * self._total * made / len(self._faults)):
            return False
        away = self._away()
        if self._aim(self._faults[made]) in away:
            return False
        if self._faults[made].kind == "emptied" and not self._remembered(away):
            return False
        if self._total - self._stored < _URGENT_PART * self._total + len(self._faults) - made:
            return True
        last = self.course.strikes[-1] if made else None
        if last is not None and not last.fault.overlaps and last.rows == self._stored:
            return False
        return all(strike.fault.overlaps or twin(strike.fault.process) not in {None, *away} for strike in self._open)

    def _remembered(self, away: set[str]) -> bool:
        """Whether a dispatcher will remember the run when Redis does not."""
        unsure = away | {strike.fault.process for strike in self._open}
        return not unsure >= {"dispatcher", "dispatcher-2"}

    def _aim(self, fault: Fault) -> str:
        """The process to strike: the other one of a pair where the first is away."""
        other = twin(fault.process)
        return other if other is not None and fault.process in self._away() else fault.process

    def _strike(self, fault: Fault, now: float) -> None:
        fault = replace(fault, process=self._aim(fault))
        self._say(now, f"{fault.kind} {fault.process}, {fault.seconds:.1f} s")
        strike = Strike(fault=fault, at=now, due=now + fault.seconds, rows=self._stored)
        if fault.process == "redis":
            self.note_burnt()
        match fault.kind:
            case "kill":
                self._fleet.kill(fault.process)
            case "stop" | "long stop":
                self._fleet.freeze(fault.process)
            case "set back":
                if not self._fleet.copy_redis(self._earlier):
                    return  # at the next tick then
            case "emptied":
                self._fleet.kill(fault.process)
                self._fleet.replace_redis(None)
        # Who is struck again before it recovered will not be seen to recover from the first strike.
        self._open = [other for other in self._open if other.fault.process != fault.process]
        self._open.append(strike)
        self.course.strikes.append(strike)

    def _bring_back(self, now: float) -> None:
        for strike in self._open:
            if strike.back is None and self._may_return(strike, now):
                self._return(strike, now)

    def _may_return(self, strike: Strike, now: float) -> bool:
        if strike.fault.kind == "set back" and now - strike.at >= 1.0:
            # What was stored in between is what Redis forgets; with enough of it the age does not matter.
            return now >= strike.due or self._stored >= strike.rows + _BEFORE_SET_BACK
        return now >= strike.due

    def _return(self, strike: Strike, now: float) -> None:
        process = strike.fault.process
        match strike.fault.kind:
            case "stop" | "long stop":
                self._fleet.thaw(process)
            case "kill" | "emptied":
                self._fleet.start(process)
            case "set back":
                self.note_burnt()
                self._fleet.kill(process)
                self._fleet.replace_redis(self._earlier)
                self._fleet.start(process)
        strike.back = now
        strike.rows = self._stored

    def _recover(self, now: float) -> None:
        for strike in list(self._open):
            if strike.back is None or now - strike.probed < _PROBE_SECONDS:
                continue
            if strike.ready is None:
                strike.probed = now
            ready = strike.ready is not None or self._fleet.ready(strike.fault.process)
            strike.see(now, ready=ready, stored=self._stored)
            if strike.recovered is not None:
                self._open.remove(strike)

    def _restart_ended(self, now: float) -> None:
        for name, code in self._fleet.ended().items():
            self._say(now, f"{name} ended by itself with code {code}")
            tail = self._fleet.tail(name, 5)
            self.course.ended.append(f"{name}: code {code} after {now:.0f} s\n{tail}")
            self._ends[name] += 1
            if self._ends[name] == _MOST_ENDS:
                raise Unavailable(f"{name} ended by itself {_MOST_ENDS} times, at last with code {code}:\n{tail}")
            self._fleet.kill(name)
            self._fleet.start(name)

    def _unstall(self, now: float) -> None:
        self._last_row = now
        try:
            view = self._bus.runs.get(self._run)
            if view is None:
                self._say(now, "no dispatcher remembers the run: submitted again")
                self._submit_again()
                self.course.resubmitted += 1
            else:
                self._say(now, f"no row for a while: {view.state} {view.reason} {view.waiting_for}".rstrip())
        except HeadraceError as error:
            self._say(now, str(error))

    def _say(self, now: float, what: str) -> None:
        print(f"{now:7.1f} s {self._stored:5d} rows  {what}", flush=True)

"""What runs are now, for people and as JSON, once or again and again."""

from __future__ import annotations

import json
import time
from abc import abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from typing import Any

from rich.console import Group, RenderableType
from rich.live import Live
from rich.text import Text

from headrace.bus import Bus
from headrace.bus.values import RunView
from headrace.errors import RedisAway, UnknownRun, Unreadable
from headrace.ids import RequestId, check_run_name
from headrace_cli import console
from headrace_cli.absence import GONE_SECONDS, Absence

NO_RUNS = "No runs. Start one with: headrace submit RUN.toml"
_LOOK_SECONDS = 1.0
BURNT_IN_JSON = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """A run at `now`, seconds of Redis TIME, and its latest burnt attempts that were asked for: id, attempt, reason."""

    view: RunView
    dead: Sequence[tuple[str, int, str]]
    now: float

    def to_json(self) -> dict[str, Any]:
        """The run as one JSON object, whose keys stay as they are.

        Counts are of samples, but for `verdicts`, `mismatches` and `reasons`, which are of dumps and attempts. `rate`
        is null while nothing is stored; times are UTC, null for what has not come yet; `engine` is the fingerprint of
        the engine that made the rows, null before the first. `dead` has the latest burnt attempts, the last one first.
        """
        view, spec = self.view, self.view.spec
        rate = view.rate(self.now)
        return {
            "run": spec.run,
            "state": view.state,
            "reason": view.reason,
            "waiting_for": view.waiting_for,
            "total": spec.total,
            "stored": view.stored,
            "rejected": view.rejected,
            "failed": view.failed,
            "open": view.open,
            "pending": view.pending,
            "in_flight": view.in_flight,
            "tokens": view.tokens,
            "bytes": view.bytes,
            "verdicts": view.verdicts,
            "mismatches": view.mismatches,
            "mismatch_rate": view.mismatches / view.verdicts if view.verdicts else 0.0,
            "reasons": dict(view.reasons),
            "rejected_by": dict(view.rejected_by),
            "failed_by": dict(view.failed_by),
            "rate": asdict(rate) if rate is not None else None,
            "created_at": _utc(view.created_at),
            "finished_at": _utc(view.finished_at),
            "output": spec.output,
            "boundaries": list(spec.boundaries),
            "final_state": spec.final_state,
            "format": spec.format,
            "engine": view.identity.engine if view.identity is not None else None,
            "weight_version": view.identity.weight_version if view.identity is not None else None,
            "dead": [
                {"request": name, "ordinal": RequestId.parse(name).ordinal, "attempt": attempt, "reason": reason}
                for name, attempt, reason in self.dead
            ],
        }


def find_run(bus: Bus, run: str) -> RunView:
    """The run as Redis has it now.

    Raises:
        UsageError: no run can have this name.
        UnknownRun: Redis does not know it.
        Unreadable: a newer version wrote it.
    """
    view = bus.runs.get(check_run_name(run))
    if view is None:
        known = ", ".join(bus.runs.names()) or "none"
        raise UnknownRun(f"no run {run!r} in Redis (known: {known}); submit its run file again to bring it back")
    return view


def report_on(bus: Bus, view: RunView, *, burnt: int) -> Report:
    """The run as it was seen just now, with so many of its latest burnt attempts."""
    dead = bus.runs.dead(view.spec.run, burnt) if burnt else ()
    return Report(view=view, dead=dead, now=bus.server_clock()[1])


def read_runs(bus: Bus, *, burnt: int) -> tuple[list[Report], list[str]]:
    """All runs as they are now, and what is wrong with those that cannot be read."""
    reports, unreadable = [], []
    for name in bus.runs.names():
        try:
            reports.append(report_on(bus, find_run(bus, name), burnt=burnt))
        except UnknownRun:
            continue  # it expired just now
        except Unreadable as error:
            unreadable.append(f"run {name!r}: {error}; submit its run file again to write it anew")
    return reports, unreadable


def print_json(value: object) -> None:
    """Print a value as one line of JSON."""
    console.out.print(json.dumps(value))


def watch(bus: Bus, run: str, *, as_json: bool) -> RunView:
    """Show a run every second until it is finished or cancelled, and return it as it ended; all runs, without end,
    where `run` is empty.

    A table on a terminal, else a line for each change; as JSON a line for each look. A Redis that is away is waited
    for, and so is a run that Redis has lost: a dispatcher that serves it brings it back.

    Raises:
        UnknownRun: Redis does not know the run, or not any more.
        Unreadable: a newer version wrote it.
    """
    screen = (_Json if as_json else _Table if console.out.is_terminal else _Lines)(one=bool(run))
    gone = Absence(GONE_SECONDS)
    seen = False
    with screen:
        while True:
            try:
                one = [report_on(bus, find_run(bus, run), burnt=screen.burnt)] if run else None
                reports, unreadable = (one, []) if one else read_runs(bus, burnt=screen.burnt)
            except RedisAway as error:
                gone.ended()
                screen.missing(f"Redis is away: {error}")
            except UnknownRun:
                if not seen or gone.too_long(time.monotonic()):
                    raise
                screen.missing(f"run {run} is gone from Redis; a dispatcher that serves it brings it back")
            else:
                gone.ended()
                seen = True
                screen.show(reports, unreadable)
                if run and reports[0].view.state in ("finished", "cancelled"):
                    return reports[0].view
            time.sleep(_LOOK_SECONDS)


class _Screen(AbstractContextManager[None]):
    """What a watcher looks at: one run, or all of them, each with so many burnt attempts."""

    def __init__(self, *, one: bool, burnt: int = 0) -> None:
        self.one = one
        self.burnt = burnt

    def __exit__(self, *_: object) -> None:
        return

    @abstractmethod
    def show(self, reports: Sequence[Report], unreadable: Sequence[str]) -> None:
        """Show the runs as they are now."""

    @abstractmethod
    def missing(self, why: str) -> None:
        """Say why nothing can be seen now."""


class _Table(_Screen):
    """A table that is drawn anew in its place."""

    def __init__(self, *, one: bool) -> None:
        super().__init__(one=one, burnt=console.BURNT_SHOWN if one else 0)
        self._live = Live(console=console.fitting(), auto_refresh=False)
        self._last: RenderableType = ""

    def __enter__(self) -> None:
        self._live.start()

    def __exit__(self, *_: object) -> None:
        self._live.stop()

    def show(self, reports: Sequence[Report], unreadable: Sequence[str]) -> None:
        if self.one:
            (report,) = reports
            self._last = console.run_table(report.view, report.dead, report.now)
        else:
            table = console.runs_table([report.view for report in reports]) if reports else Text(NO_RUNS)
            self._last = Group(table, *(Text(console.one_line(problem), style="red") for problem in unreadable))
        self._live.update(self._last, refresh=True)

    def missing(self, why: str) -> None:
        self._live.update(Group(self._last, Text(why, style="red")), refresh=True)


class _Lines(_Screen):
    """A line for each change, for a pipe or a log."""

    def __init__(self, *, one: bool) -> None:
        super().__init__(one=one)
        self._said = dict[str, str]()

    def show(self, reports: Sequence[Report], unreadable: Sequence[str]) -> None:
        said = {report.view.spec.run: console.run_line(report.view) for report in reports}
        self._say(said | {problem: problem for problem in unreadable} or {"": NO_RUNS})

    def missing(self, why: str) -> None:
        self._say({"": why})

    def _say(self, said: dict[str, str]) -> None:
        for name, line in said.items():
            if self._said.get(name) != line:
                console.out.print(console.one_line(line))
        self._said = said


class _Json(_Screen):
    """A line of JSON for each look; what is no run goes to stderr, once."""

    def __init__(self, *, one: bool) -> None:
        super().__init__(one=one, burnt=BURNT_IN_JSON)
        self._said = list[str]()

    def show(self, reports: Sequence[Report], unreadable: Sequence[str]) -> None:
        self._say(unreadable)
        print_json(reports[0].to_json() if self.one else [report.to_json() for report in reports])

    def missing(self, why: str) -> None:
        self._say([why])

    def _say(self, problems: Sequence[str]) -> None:
        for problem in problems:
            if problem not in self._said:
                console.err.print(console.one_line(problem))
        self._said = list(problems)


def _utc(seconds: float | None) -> str | None:
    return None if seconds is None else datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")

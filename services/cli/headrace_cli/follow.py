"""Follows a run with a progress bar until it ends."""

from __future__ import annotations

import time
from collections.abc import Callable

from rich.console import Console

from headrace.bus import Bus
from headrace.bus.values import DESTINATION_FULL, RunView
from headrace.errors import Conflict, Unavailable, UnknownRun
from headrace_cli import console
from headrace_cli.absence import GONE_SECONDS, Absence
from headrace_cli.status import find_run

_LOOK_SECONDS = 0.3
_PATIENCE_SECONDS = 120.0  # for a Redis that went away


def follow(bus: Bus, run: str, check: Callable[[], None] | None = None, to: Console = console.out) -> RunView:
    """Show progress until the run is finished or cancelled; `check` may raise to end it.

    A run that is paused by a full destination is waited for: it goes on by itself when there is room. So is one that
    Redis has lost: a dispatcher that serves it brings it back.

    Raises:
        UnknownRun: Redis does not know the run any more.
        Conflict: the run is paused for another reason, and stays so until somebody resumes it.
        Unavailable: Redis stays away.
    """
    with console.progress_bar(to) as bar:
        task = bar.add_task(run, total=None)
        away, gone = Absence(_PATIENCE_SECONDS), Absence(GONE_SECONDS)
        while True:
            if check is not None:
                check()
            try:
                view = find_run(bus, run)
            except Unavailable:
                gone.ended()
                if away.too_long(time.monotonic()):
                    raise
                bar.update(task, description=f"{run}: Redis is away")
                time.sleep(1.0)
                continue
            except UnknownRun:
                away.ended()
                if gone.too_long(time.monotonic()):
                    raise
                bar.update(task, description=f"{run}: gone from Redis")
                time.sleep(1.0)
                continue
            away.ended()
            gone.ended()
            bar.update(task, description=_describe(view), completed=view.spec.total - view.open, total=view.spec.total)
            if view.state in ("finished", "cancelled"):
                return view
            if view.state == "paused" and view.reason != DESTINATION_FULL:
                raise Conflict(
                    f"run {run!r} is paused: {console.quoted(view.reason)}; go on with: headrace resume {run}"
                )
            time.sleep(_LOOK_SECONDS)


def _describe(view: RunView) -> str:
    if view.state == "paused":
        return f"{view.spec.run}: paused, {console.quoted(view.reason)}"
    if view.waiting_for:
        return f"{view.spec.run}: waiting"
    return f"{view.spec.run}: {view.tokens:,} tokens · {view.in_flight} in flight"

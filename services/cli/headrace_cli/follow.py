"""Follows a run with a progress bar until it ends."""

from __future__ import annotations

import time
from collections.abc import Callable

from rich.console import Console

from headrace.bus import Bus
from headrace.bus.values import DESTINATION_FULL, RunView
from headrace.errors import Conflict, Unavailable, UsageError
from headrace_cli import console

_LOOK_SECONDS = 0.3
_PATIENCE_SECONDS = 120.0  # for a Redis that went away


def follow(bus: Bus, run: str, check: Callable[[], None] | None = None, to: Console = console.out) -> RunView:
    """Show progress until the run is finished or cancelled; `check` may raise to end it.

    A run that is paused by a full destination is waited for: it goes on by itself when there is room.

    Raises:
        UsageError: Redis does not know the run any more.
        Conflict: the run is paused for another reason, and stays so until somebody resumes it.
        Unavailable: Redis stays away.
    """
    with console.progress_bar(to) as bar:
        task = bar.add_task(run, total=None)
        away_since: float | None = None
        while True:
            if check is not None:
                check()
            try:
                view = bus.runs.get(run)
                away_since = None
            except Unavailable:
                away_since = away_since or time.monotonic()
                if time.monotonic() - away_since > _PATIENCE_SECONDS:
                    raise
                bar.update(task, description=f"{run}: Redis is away")
                time.sleep(1.0)
                continue
            if view is None:
                raise UsageError(f"run {run!r} is gone from Redis; submit its run file again")
            bar.update(task, description=_describe(view), completed=view.spec.total - view.open, total=view.spec.total)
            if view.state in ("finished", "cancelled"):
                return view
            if view.state == "paused" and view.reason != DESTINATION_FULL:
                raise Conflict(f"run {run!r} is paused: {view.reason}; go on with: headrace resume {run}")
            time.sleep(_LOOK_SECONDS)


def _describe(view: RunView) -> str:
    if view.state == "paused":
        return f"{view.spec.run}: paused, {view.reason}"
    if view.waiting_for:
        return f"{view.spec.run}: waiting"
    return f"{view.spec.run}: {view.tokens:,} tokens · {view.in_flight} in flight"

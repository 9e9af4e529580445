"""How the command line speaks: tables, progress, and numbers for people."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.console import Console, ConsoleOptions, RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeRemainingColumn
from rich.segment import Segment
from rich.table import Table

from headrace.bus.values import RunView

BURNT_SHOWN = 5
MOST_CHARACTERS = 500  # of a reason
# Control characters but the tab and the line's end are left out. What is no text, of a file's name, what turns the
# direction of writing, and other ends of lines are shown to be there.
_DIRECTIONS = (0x061C, 0x200E, 0x200F, *range(0x202A, 0x202F), *range(0x2066, 0x206A))
_UNPRINTABLE = dict.fromkeys((*range(9), *range(11, 32), *range(127, 160))) | dict.fromkeys(
    (*_DIRECTIONS, 0x2028, 0x2029, *range(0xD800, 0xE000)), "\ufffd"
)


def printable(text: str) -> str:
    """The text without what a terminal would obey: reasons, paths and reports come from others."""
    return text.translate(_UNPRINTABLE)


def one_line(text: str) -> str:
    """The printable text as one line: where a line is a record, nobody's words make another one."""
    return printable(text).replace("\n", "\\n")


def quoted(text: str) -> str:
    """A reason in one line, cut at its most characters."""
    return one_line(text if len(text) <= MOST_CHARACTERS else f"{text[: MOST_CHARACTERS - 1]}…")


class _DataConsole(Console):
    """A console to which text is data: brackets and colons mean nothing in it, control characters are left out."""

    def __init__(self, *, stderr: bool = False, soft_wrap: bool = True) -> None:
        super().__init__(stderr=stderr, markup=False, emoji=False, highlight=False, soft_wrap=soft_wrap)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Render as rich does; its own escape sequences are styles or control segments, never text."""
        for segment in super().render(renderable, options):
            yield segment if segment.is_control else Segment(printable(segment.text), segment.style)


out = _DataConsole()
err = _DataConsole(stderr=True)


def fitting() -> Console:
    """A console on stdout whose lines are folded at its width: what is drawn in place must know its height."""
    return _DataConsole(soft_wrap=False)


def progress_bar(to: Console = out) -> Progress:
    """A bar with counts, a description and an estimate of the time left."""
    return Progress(
        SpinnerColumn(),
        TextColumn("{task.description}", style="progress.description", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        console=to,
    )


def human_bytes(count: float) -> str:
    """`1.5 GiB`."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"


def human_seconds(seconds: float) -> str:
    """`1h 02m`, `3m 20s` or `12s`."""
    whole = round(seconds)
    if whole >= 3600:
        return f"{whole // 3600}h {whole % 3600 // 60:02d}m"
    return f"{whole // 60}m {whole % 60:02d}s" if whole >= 60 else f"{whole}s"


def books(view: RunView) -> str:
    """The line that a run ends with."""
    return (
        f"stored {view.stored} / {view.spec.total} · rejected {view.rejected} · failed {view.failed} · "
        f"mismatches {view.mismatches}"
    )


def why_failed(view: RunView) -> str:
    """The reasons of failed samples, to put behind the books; empty when none failed."""
    reasons = ", ".join(f"{reason} {count}" for reason, count in view.failed_by.items())
    return one_line(f" (failed: {reasons})") if reasons else ""


def state_of(view: RunView) -> str:
    """The state, with its reason."""
    return f"{view.state}: {quoted(view.reason)}" if view.reason else view.state


def runs_table(views: list[RunView]) -> Table:
    """A row for each run."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("run", "state", "stored", "rejected", "failed", "open", "output"):
        right = name in ("stored", "rejected", "failed", "open")
        table.add_column(name, justify="right" if right else "left", overflow="fold")
    for view in views:
        counts = (f"{view.stored} / {view.spec.total}", str(view.rejected), str(view.failed), str(view.open))
        table.add_row(view.spec.run, state_of(view), *counts, view.spec.output)
    return table


def run_line(view: RunView) -> str:
    """One run in one line, without what changes with the time alone."""
    waiting = f" · waiting for {quoted(view.waiting_for)}" if view.waiting_for else ""
    now = f"open {view.open} · {view.in_flight} in flight{waiting}"
    return one_line(f"run {view.spec.run} is {state_of(view)} · {books(view)}{why_failed(view)} · {now}")


def run_table(view: RunView, dead: Sequence[tuple[str, int, str]], now: float) -> Table:
    """All about one run: progress, rate, time left, reasons.

    `dead` are its latest burnt attempts: request id, attempt, reason; `now` is in seconds of Redis TIME.
    """
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    spec = view.spec
    table.add_row("run", f"{spec.run}  ({state_of(view)})")
    if view.waiting_for:
        table.add_row("waiting for", quoted(view.waiting_for))
    table.add_row("samples", books(view) + f" · open {view.open}")
    table.add_row("now", f"{view.pending} pending · {view.in_flight} in flight · {view.fed} fed and not done")
    table.add_row("stored", f"{view.tokens:,} tokens · {human_bytes(view.bytes)}")
    table.add_row("rate", _rate(view, now))
    for title, counts in (
        ("ended attempts", view.reasons),
        ("rejected", view.rejected_by),
        ("failed", view.failed_by),
    ):
        if counts:
            table.add_row(title, one_line(" · ".join(f"{reason} {count}" for reason, count in counts.items())))
    if dead:
        shown = dead[:BURNT_SHOWN]
        last = [one_line(f"{reason}: attempt {attempt}, {request}") for request, attempt, reason in shown]
        table.add_row("last burnt attempts", "\n".join(last))
    if view.identity is not None:
        table.add_row("engine", f"{view.identity.engine}, weights {view.identity.weight_version}")
    table.add_row("boundaries", f"{list(spec.boundaries)} and {spec.final_state}, format {spec.format}")
    table.add_row("output", spec.output)
    return table


def _rate(view: RunView, now: float) -> str:
    if view.state == "finished" and view.finished_at is not None:
        if view.reopened_at is None:
            return f"finished in {human_seconds(view.finished_at - view.created_at)}"
        return f"failed samples tried again in {human_seconds(view.finished_at - view.reopened_at)}"
    rate = view.rate(now)
    if rate is None:
        return "no row stored lately"
    left = human_seconds(rate.seconds_left)
    return f"{rate.rows_per_second:.1f} rows/s · {rate.tokens_per_second:,.0f} tokens/s · {left} left"

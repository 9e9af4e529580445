"""The commands of `headrace`."""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Generator
from contextlib import closing
from pathlib import Path
from types import FrameType
from typing import Annotated

import typer
from rich.text import Text

import headrace
from headrace.bus import Bus
from headrace.bus.values import RunState, RunView
from headrace.errors import Conflict, RunIncomplete, Unavailable, Unreadable, UsageError
from headrace.settings import load_settings
from headrace_cli import console
from headrace_cli.doctor import Finding, Options, conclude, diagnose, examine
from headrace_cli.follow import follow
from headrace_cli.status import BURNT_IN_JSON, NO_RUNS, find_run, print_json, read_runs, report_on, watch
from headrace_cli.submit import SMOLLM2, submit_run

app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
    help="Hidden states of a served model, proven token by token, on their way to draft training.",
    epilog="Exit codes: 0 done, 1 error, 2 wrong input, 3 something is away, 4 conflict, 5 verification failed, "
    "6 the run ended with samples open, 130 Ctrl-C.",
)

Run = Annotated[str, typer.Argument(help="The run's name.", show_default=False)]


@app.callback(invoke_without_command=True)
def _version(version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False) -> None:
    if version:
        console.out.print(f"headrace {headrace.__version__}")
        raise typer.Exit


@app.command()
def demo(
    folder: Annotated[Path, typer.Option(help="Where everything of the demo lives.")] = Path("headrace-demo"),
    fresh: Annotated[bool, typer.Option("--fresh", help="Delete an earlier demo in that folder first.")] = False,
    limit: Annotated[int | None, typer.Option(min=1, help="Extract only the first N conversations.")] = None,
    model: Annotated[str, typer.Option(help="A checkpoint folder instead, small enough for this CPU.")] = SMOLLM2,
) -> None:
    """Extract 60 conversations with a real model on this machine, and verify every row.

    With HEADRACE_REDIS_URL set that server is used, else one is started.
    """
    from headrace.extras import needs_extra

    with needs_extra("all"):
        from headrace_cli.demo import run_demo
    run_demo(folder, fresh=fresh, limit=limit, model=model)


@app.command()
def submit(
    run_file: Annotated[Path, typer.Argument(help="The run's TOML file.", show_default=False)],
    start: Annotated[int, typer.Option(min=0, help="First sample of the data.")] = 0,
    end: Annotated[int | None, typer.Option(min=1, help="Sample to stop before.")] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="At most so many samples.")] = None,
    only_failed: Annotated[
        bool, typer.Option("--only-failed", help="Of a run that was submitted before, try the failed samples again.")
    ] = False,
    wait: Annotated[bool, typer.Option("--wait", help="Follow the run until it ends.")] = False,
    engine_check: Annotated[
        bool, typer.Option(help="Refuse when no registered engine can serve the run; --no-engine-check queues it.")
    ] = True,
) -> None:
    """Normalise a run's samples into its output folder and start it, or go on with it."""
    with _bus() as bus:
        view = submit_run(
            bus, run_file, start=start, end=end, limit=limit, engine_check=engine_check, only_failed=only_failed
        )
        if wait and view.state != "finished":
            view = follow(bus, view.spec.run)
            console.out.print(f"run {view.spec.run} is {view.state}: {console.books(view)}{console.why_failed(view)}")
            _finish(view)


@app.command("list")
def list_runs() -> None:
    """List the runs that Redis knows."""
    with _bus() as bus:
        _show_all(bus, as_json=False)


@app.command()
def status(
    run: Annotated[str, typer.Argument(help="The run's name; all runs when left out.")] = "",
    wait: Annotated[bool, typer.Option("--wait", help="Follow the run until it ends.")] = False,
    watched: Annotated[
        bool, typer.Option("--watch", help="Show it every second, until the run ends or Ctrl-C.")
    ] = False,
    as_json: Annotated[
        bool,
        typer.Option("--json", help="Print JSON: an object for a run, a list for all, with --watch each second."),
    ] = False,
) -> None:
    """Show a run's progress, rate, time left, and reasons."""
    if wait and (watched or not run):
        raise UsageError("--wait follows one run with a bar: name it, and leave out --watch")
    with _bus() as bus:
        if watched:
            _finish(watch(bus, run, as_json=as_json))
            return
        if not run:
            _show_all(bus, as_json=as_json)
            return
        view = find_run(bus, run)
        if wait:
            view = follow(bus, run, to=console.err if as_json else console.out)
        report = report_on(bus, view, burnt=BURNT_IN_JSON if as_json else console.BURNT_SHOWN)
        if as_json:
            print_json(report.to_json())
        else:
            console.out.print(console.run_table(report.view, report.dead, report.now))
    _finish(report.view)


@app.command()
def pause(run: Run, reason: Annotated[str, typer.Option(help="Shown by status.")] = "by hand") -> None:
    """Give out no more samples of a run; what is in flight is still stored."""
    _check_reason(reason)
    with _bus() as bus:
        find_run(bus, run)
        _say(run, bus.runs.pause(run, reason, by_hand=True), "paused")


@app.command()
def resume(run: Run) -> None:
    """Go on with a paused run."""
    with _bus() as bus:
        find_run(bus, run)
        _say(run, bus.runs.activate(run), "active", "finished")


@app.command()
def cancel(run: Run) -> None:
    """Stop a run for good; submitting it again goes on with it."""
    with _bus() as bus:
        find_run(bus, run)
        _say(run, bus.runs.cancel(run), "cancelled")


@app.command()
def verify(
    folder: Annotated[Path, typer.Argument(help="The dataset's folder.", show_default=False)],
    model: Annotated[
        Path | None, typer.Option(help="Checkpoint to recompute with; the run's own if it is here.")
    ] = None,
    sample: Annotated[int, typer.Option(min=0, help="Rows to recompute; 0 for none.")] = 8,
    all_rows: Annotated[bool, typer.Option("--all", help="Recompute every row.")] = False,
    semantic: Annotated[bool, typer.Option(help="Check next-token ranks with the model's head.")] = True,
    tolerance: Annotated[float | None, typer.Option(help="Median relative error of a token; default by dtype.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as JSON.")] = False,
) -> None:
    """Check a dataset without trusting the pipeline: books, checksums, shapes, and recomputed states."""
    from headrace_cli.verify import render
    from headrace_cli.verify import verify as run_verify

    with console.progress_bar() as bar:
        task = bar.add_task("verifying", total=None, visible=not as_json)
        report = run_verify(
            folder,
            model=model,
            sample=sample,
            all_rows=all_rows,
            semantic=semantic,
            tolerance=tolerance,
            progress=lambda done, total: bar.update(task, completed=done, total=total),
        )
    if as_json:
        console.out.print_json(json.dumps(report.to_json()), ensure_ascii=True)
    else:
        console.out.print(render(report))
    report.require_whole()


@app.command()
def doctor(
    url: Annotated[
        str, typer.Argument(help="An engine's http://HOST:PORT, to be proven from end to end.", show_default=False)
    ] = "",
    model: Annotated[
        str, typer.Option(help="The served checkpoint's folder; the engine's own path if it is here.")
    ] = "",
    output: Annotated[
        Path | None,
        typer.Option(
            help="A new folder for the canaries' rows, which writers reach; one below this folder by default."
        ),
    ] = None,
    keep: Annotated[bool, typer.Option("--keep", help="Leave the canaries' rows there.")] = False,
    timeout: Annotated[float, typer.Option(min=1, max=86_400, help="Seconds that the canaries may take.")] = 120.0,
) -> None:
    """Check Redis, the registered engines, their writers and the dispatchers, and say what to change.

    With an engine's URL: also its flags, canaries through every part to rows, and these against its own next tokens.
    """
    settings = load_settings()
    if not url:
        findings = _tell(examine(settings))
        bad = sum(not finding.ok for finding in findings)
        if bad:
            raise Unavailable(f"{bad} of {len(findings)} checks need a change; see above")
        return
    for number in (signal.SIGTERM, signal.SIGHUP):  # or the canaries would be left behind
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, _end)
    found = _tell(diagnose(settings, Options(url=url, model=model, output=output, keep=keep, seconds=timeout)))
    console.out.print(console.one_line(conclude(found, url)))


def _bus() -> closing[Bus]:
    """A bus over the settings' Redis, closed at the end of the block."""
    return closing(Bus.from_settings(load_settings()))


def _end(number: int, frame: FrameType | None) -> None:
    sys.exit(128 + number)


def _tell(findings: Generator[Finding, None, None]) -> list[Finding]:
    """Print findings as they come; what makes them is closed also if nobody reads them any more."""
    told = []
    with closing(findings), console.out.status("looking"):
        for finding in findings:
            _show(finding)
            told.append(finding)
    return told


def _show(finding: Finding) -> None:
    mark, style = {True: ("ok  ", "green"), False: ("fix ", "red"), None: ("?   ", "yellow")}[finding.ok]
    fix = console.one_line(finding.fix)
    more = {True: "", False: f"\n     {fix}", None: f": {fix}"}[finding.ok]
    console.out.print(Text(mark, style=style), console.one_line(finding.what) + more)


def _show_all(bus: Bus, *, as_json: bool) -> None:
    reports, unreadable = read_runs(bus, burnt=BURNT_IN_JSON if as_json else 0)
    if as_json:
        print_json([report.to_json() for report in reports])
    elif reports:
        console.out.print(console.runs_table([report.view for report in reports]))
    elif not unreadable:
        console.out.print(NO_RUNS)
    if unreadable:
        raise Unreadable("; ".join(unreadable))


def _say(run: str, state: RunState | None, *wanted: RunState) -> None:
    if state not in wanted:
        raise Conflict(f"run {run!r} is {state or 'gone'}; it cannot become {wanted[0]}")
    console.out.print(f"run {run}: {state}")


def _check_reason(reason: str) -> None:
    if len(reason) > console.MOST_CHARACTERS:
        raise UsageError(f"--reason has {len(reason)} characters; give at most {console.MOST_CHARACTERS}")
    try:
        reason.encode()
    except UnicodeEncodeError as error:
        raise UsageError(f"--reason {reason!r} is no UTF-8 text; give it as one") from error


def _finish(view: RunView) -> None:
    if view.state in ("finished", "cancelled") and view.open:
        raise RunIncomplete(f"run {view.spec.run} is {view.state} with {view.open} samples open; submit it again")

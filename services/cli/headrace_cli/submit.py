"""`headrace submit`: the run file, its samples, and Redis brought up to the output folder."""

from __future__ import annotations

from pathlib import Path

from headrace.bus import Bus
from headrace.bus.values import RunView, Site
from headrace.errors import Conflict, Unavailable
from headrace.formats import FORMATS
from headrace.manifest import read_dataset
from headrace.runs import Identity, RunSpec
from headrace_cli import console
from headrace_dispatcher.prepare import prepare
from headrace_dispatcher.rebuild import rebuild
from headrace_dispatcher.runfile import load_run_file

SMOLLM2 = "smollm2"


def resolve_model(word: str) -> Path | None:
    """`smollm2` is the checkpoint that ships in a package; other words are folders."""
    if word != SMOLLM2:
        return None
    from headrace.extras import needs_extra

    with needs_extra("all"):
        from headrace_engine.checkpoint import smollm2_checkpoint
    return smollm2_checkpoint()


def submit_run(
    bus: Bus, run_file: Path, *, start: int, end: int | None, limit: int | None, engine_check: bool
) -> RunView:
    """Submit, say what happened, and return the run as it is now.

    Raises:
        UsageError, Conflict, Unreadable: see `headrace_dispatcher.prepare.prepare`.
        Conflict: Redis has another extraction of this name, or lines that the folder lacks, or every engine serves
            something else.
        Unavailable: no engine is registered.
    """
    loaded = load_run_file(run_file)
    if loaded.trust_remote_code:
        console.err.print(f"{run_file}: trust_remote_code = true changes nothing: no checkpoint's own code is ever run")
    with console.progress_bar() as bar:
        task = bar.add_task("normalising samples", total=None)
        prepared = prepare(
            loaded,
            start=start,
            end=end,
            limit=limit,
            resolve_model=resolve_model,
            known_formats=FORMATS,
            progress=lambda done, total: bar.update(task, completed=done, total=total),
        )
        bar.update(task, visible=False)
    prepared.inputs.close()
    spec = prepared.spec
    if engine_check:
        dataset = read_dataset(Path(spec.output))
        identity = dataset.identity if dataset is not None else bus.runs.identity(spec.run)
        check_engines(bus.sites.registered(), spec, identity)
    learnt = rebuild(bus, spec)
    view = bus.runs.get(spec.run)
    if view is None:
        raise Unavailable(f"run {spec.run!r} vanished from Redis just now; submit it again")
    _report(view, created=prepared.created, learnt=learnt, rejected=dict(prepared.rejected))
    return view


def check_engines(sites: list[Site], spec: RunSpec, identity: Identity | None) -> None:
    """Refuse a run that no registered engine can serve; `identity` is its rows', if it has some."""
    if not sites:
        message = "no engine is registered: start an engine and its watcher (`headrace doctor` looks closer)"
        raise Unavailable(f"{message}, or queue the run with --no-engine-check")
    problems = [(site.url, site.unfit_for(spec, identity)) for site in sites]
    if all(problem for _, problem in problems):
        raise Conflict(
            f"no engine can serve run {spec.run!r}: {'; '.join(f'{url}: {problem}' for url, problem in problems)}. "
            "Change the run file or the engine's configuration, or queue the run with --no-engine-check"
        )


def _report(view: RunView, *, created: bool, learnt: int, rejected: dict[str, int]) -> None:
    spec = view.spec
    if created:
        reasons = ", ".join(f"{reason} {count}" for reason, count in sorted(rejected.items()))
        note = f", {sum(rejected.values())} of them rejected ({reasons})" if rejected else ""
        console.out.print(f"run {spec.run}: {spec.total} samples{note}, into {spec.output}")
    elif view.state == "finished":
        console.out.print(f"run {spec.run} is finished already, nothing to do: {console.books(view)}")
    else:
        again = f", {learnt} found in its manifest" if learnt else ""
        console.out.print(f"run {spec.run} goes on: {console.books(view)}{again}")
    if view.state == "paused":
        console.out.print(f"run {spec.run} is paused ({view.reason}); go on with: headrace resume {spec.run}")

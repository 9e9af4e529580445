"""`headrace submit`: the run file, its samples, and Redis brought up to the output folder."""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path

from headrace.bus import Bus
from headrace.bus.values import RunView, Site
from headrace.errors import Conflict, Unavailable, UsageError
from headrace.formats import FORMATS
from headrace.manifest import INPUTS_FOLDER, SPEC_FILE, read_dataset
from headrace.runs import Identity, RunSpec
from headrace_cli import console
from headrace_dispatcher.prepare import prepare
from headrace_dispatcher.rebuild import rebuild, retry_failed
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
    bus: Bus,
    run_file: Path,
    *,
    start: int,
    end: int | None,
    limit: int | None,
    engine_check: bool,
    only_failed: bool = False,
) -> RunView:
    """Submit, say what happened, and return the run as it is now.

    `only_failed`: the run was submitted before; those of its samples that failed are extracted again.

    Raises:
        UsageError, Conflict, Unreadable: see `headrace_dispatcher.prepare.prepare`.
        UsageError: with `only_failed`, the run was never submitted into its output.
        Conflict: Redis has another extraction of this name, or lines that the folder lacks, or every engine serves
            something else; with `only_failed`, the run is cancelled.
        Unavailable: no engine is registered.
    """
    loaded = load_run_file(run_file)
    if loaded.trust_remote_code:
        console.err.print(f"{run_file}: trust_remote_code = true changes nothing: no checkpoint's own code is ever run")
    if only_failed and not os.path.lexists(loaded.output / INPUTS_FOLDER / SPEC_FILE):
        raise UsageError(
            f"run {loaded.name!r} was never submitted into {loaded.output}, so none of its samples failed; "
            "submit it without --only-failed"
        )
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
    needs_engine = _needs_engine_again(bus, spec) if only_failed else True
    if engine_check and needs_engine:
        dataset = read_dataset(Path(spec.output))
        identity = dataset.identity if dataset is not None else bus.runs.identity(spec.run)
        check_engines(bus.sites.registered(), spec, identity)
    learnt = rebuild(bus, spec)
    again = retry_failed(bus, spec) if only_failed else None
    view = bus.runs.get(spec.run)
    if view is None:
        raise Unavailable(f"run {spec.run!r} vanished from Redis just now; submit it again")
    if again is None:
        _report(view, created=prepared.created, learnt=learnt, rejected=prepared.rejected)
    elif again:
        console.out.print(f"run {spec.run}: failed samples that go again: {again.total()} ({_by_reason(again)})")
    elif view.failed:
        console.out.print(
            f"run {spec.run} is {view.state}, and of its {view.failed} failed samples none goes again: the manifest in "
            f"{spec.output} names no sample that only failed; look at it with: headrace verify {spec.output}"
        )
    else:
        console.out.print(f"run {spec.run} is {view.state}, and no sample of it failed: {console.books(view)}")
    if view.state == "paused":
        console.out.print(
            f"run {spec.run} is paused ({console.quoted(view.reason)}); go on with: headrace resume {spec.run}"
        )
    return view


def _needs_engine_again(bus: Bus, spec: RunSpec) -> bool:
    """Whether samples failed. A run that Redis does not know begins with everything that its folder lacks."""
    known = bus.runs.get(spec.run)
    if known is None or known.spec.digest != spec.digest:
        return True
    if known.state == "cancelled":
        raise Conflict(
            f"run {spec.run!r} is cancelled, with {known.open} samples open besides the failed ones: submit it without "
            "--only-failed first, which goes on with it"
        )
    return bool(known.failed or bus.runs.failed(spec.run))


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


def _report(view: RunView, *, created: bool, learnt: int, rejected: Counter[str]) -> None:
    spec = view.spec
    if created:
        note = f", {rejected.total()} of them rejected ({_by_reason(rejected)})" if rejected else ""
        console.out.print(f"run {spec.run}: {spec.total} samples{note}, into {spec.output}")
    elif view.state == "finished":
        again = "; try the failed ones again with --only-failed" if view.failed else ""
        console.out.print(f"run {spec.run} is finished already, nothing to do: {console.books(view)}{again}")
    else:
        again = f", {learnt} found in its manifest" if learnt else ""
        console.out.print(f"run {spec.run} goes on: {console.books(view)}{again}")


def _by_reason(counts: Counter[str]) -> str:
    return console.one_line(", ".join(f"{reason} {count}" for reason, count in sorted(counts.items())))

"""A small run of the doctor's own through every part, kept to one site, and taken back when it was looked at."""

from __future__ import annotations

import json
import secrets
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from headrace.bus import Bus
from headrace.bus.values import DESTINATION_FULL, RunView, Site
from headrace.errors import HeadraceError, UsageError, VerificationFailed
from headrace.formats import FORMATS
from headrace.reasons import MISMATCHES
from headrace.runs import RunSpec
from headrace_cli.doctor.findings import Finding, well, wrong
from headrace_cli.doctor.folders import SHARED, absolute, make_or_refuse
from headrace_cli.doctor.prompts import HIGHEST_ID, Prompt
from headrace_dispatcher.prepare import prepare
from headrace_dispatcher.rebuild import rebuild
from headrace_dispatcher.runfile import RunFile
from headrace_watcher.canary import explain

_FORMAT = "headrace"
_ATTEMPTS = 2
_LOOK_SECONDS = 0.2
_PATIENCE_SECONDS = 15.0  # with a run that waits for the same thing all the time
_LEAVE_SECONDS, _HURRY_SECONDS = 15.0, 3.0  # at most, for what is under way when a run is given up, and on Ctrl-C
_FORGET_SECONDS = 3600.0  # `headrace list` shows the run for so long
_SLACK_SECONDS = 60.0  # beyond what the run may take, before a dispatcher ends it for a doctor that was killed


class CanaryRun:
    """The run, from its submit to its end; a context manager that cancels what is left of it and removes its folder.

    `left` says, after the block, what could not be taken back; empty if nothing.
    """

    def __init__(
        self, bus: Bus, site: Site, prompts: Sequence[Prompt], checkpoint: Path | None, *, seconds: float
    ) -> None:
        """Nothing is submitted yet. `checkpoint` is the served model's folder, None where it is not here; `seconds` is
        what the run may take."""
        self._bus = bus
        self._site = site
        self._prompts = prompts
        self._seconds = seconds
        self._checkpoint = checkpoint
        self.name = f"doctor{secrets.token_hex(4)}"
        self.left = ""
        self._output: Path | None = None
        self._made = self._keep = self._submitted = False

    def submit(self, output: Path | None, *, keep: bool) -> RunSpec:
        """Submit the prompts as samples into `output`, or into a new folder here; `keep` leaves it there.

        Raises:
            UsageError: the folder cannot be used, or the checkpoint is not what the site serves.
            Conflict: the folder holds something.
            Unavailable: Redis is away.
        """
        place = absolute(output or Path(f"headrace-{self.name}"))
        self._made = make_or_refuse(place)
        self._output = place  # from here on it is ours to remove
        self._keep = keep
        spec = self._prepared(place)
        if problem := self._site.unfit_for(spec, None):
            raise UsageError(f"{spec.model} is not what site {self._site.site} serves: {problem}; give its --model")
        self._submitted = True
        self._bus.runs.create(spec)
        self._bus.runs.keep_to(spec.run, self._site.site, self._seconds + _SLACK_SECONDS)
        rebuild(self._bus, spec)
        return spec

    def wait(self) -> Finding:
        """Wait until every sample has its row, or it is plain that one has none.

        Raises:
            Unavailable: Redis is away.
        """
        began = since = time.monotonic()
        waiting_for = ""
        while True:
            view = self._bus.runs.get(self.name)
            if view is None:
                return wrong("canaries: their run vanished from Redis", "does Redis evict, or was it emptied?")
            now = time.monotonic()
            if not view.waiting_for or view.waiting_for != waiting_for:
                waiting_for, since = view.waiting_for, now
            over = view.state in ("finished", "cancelled", "paused") or now - since > _PATIENCE_SECONDS
            took = now - began
            if over or took > self._seconds:
                return judge(view, self._bus.runs.states(self.name), took)
            time.sleep(_LOOK_SECONDS)

    def __enter__(self) -> Self:
        """Take back in any case what `submit` does."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Cancel the run, wait a moment for what is under way, and remove the folder."""
        over = True
        if self._submitted:
            # Said in any case: the wait may be broken off.
            self.left = f"something of run {self.name} is still under way, and ends by itself"
            self.left += f"; after that remove {self._output}"
            try:
                over = self._cancel(min(self._seconds, _LEAVE_SECONDS if kind is None else _HURRY_SECONDS))
            except HeadraceError as problem:
                over = False
                self.left = f"run {self.name} could not be ended: {problem}; later: headrace cancel {self.name}"
                self.left += f"; after that remove {self._output}"
        if not over:  # a writer that finds no folder would go on trying
            return
        self.left = ""
        if self._output is not None and not self._keep:
            self._remove(self._output)

    def _cancel(self, seconds: float) -> bool:
        """Whether nothing of the run is under way any more."""
        self._bus.runs.cancel(self.name)
        self._bus.runs.expire(self.name, _FORGET_SECONDS)  # now, should the wait be broken off
        until = time.monotonic() + seconds
        while (over := not self._under_way()) is False and time.monotonic() < until:
            time.sleep(_LOOK_SECONDS)
        self._bus.runs.expire(self.name, _FORGET_SECONDS)
        return over

    def _under_way(self) -> bool:
        states = self._bus.runs.states(self.name)
        return bool(states["in_flight"] or states["captured"])

    def _remove(self, output: Path) -> None:
        try:
            if self._made:
                shutil.rmtree(output)
                return
            for entry in output.iterdir():  # the folder itself was there before
                shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
        except FileNotFoundError:
            return
        except OSError as error:
            self.left = f"{error.filename or output} cannot be removed ({error.strerror}); remove {output}"

    def _prepared(self, place: Path) -> RunSpec:
        """Write the run's inputs into the place."""
        try:
            with tempfile.TemporaryDirectory(prefix="headrace-doctor-", ignore_cleanup_errors=True) as scratch:
                run_file = self._run_file(place, Path(scratch))
                prepared = prepare(run_file, resolve_model=lambda word: None, known_formats=FORMATS)
        except OSError as error:
            why = f"{error.strerror}{f': {error.filename}' if error.filename else ''}"
            raise UsageError(f"no temporary file can be written ({why}); make room, or set TMPDIR") from error
        prepared.inputs.close()
        return prepared.spec

    def _run_file(self, output: Path, scratch: Path) -> RunFile:
        """A run as its file would ask for it, and the files that it names."""
        data = scratch / "canaries.jsonl"
        data.write_text("".join(_sample(number, prompt) for number, prompt in enumerate(self._prompts)))
        return RunFile(
            path=data,
            name=self.name,
            data=(data,),
            output=output,
            model=str(self._checkpoint or _stand_in(scratch / "model", self._site)),
            engine_model=self._site.model,
            boundaries=self._site.boundaries,
            final_state="pre_norm" if self._site.final_state == "pre_norm" else "post_norm",
            format=_FORMAT,
            max_length=max(len(prompt.token_ids) for prompt in self._prompts),
            max_attempts=_ATTEMPTS,
            chat_template=None,
            mask="all",
            trust_remote_code=False,
        )


def judge(view: RunView, states: Counter[str], seconds: float) -> Finding:
    """What became of the run after so many seconds; `states` counts its open samples by theirs."""
    what = f"canaries: {view.stored} of {view.spec.total} stored in {seconds:.1f} s"
    tries = ", ".join(f"{reason} {count}" for reason, count in view.reasons.items())
    refused = next((reason for reason in view.reasons if reason in MISMATCHES), "")
    if refused:
        return wrong(f"{what}, dumps refused: {tries}", explain(refused, "see the watcher's log"), VerificationFailed)
    if view.state == "paused" and view.reason == DESTINATION_FULL:
        full = f"{view.reason}: make room in {view.spec.output}, or give --output a folder with more"
        return wrong(f"{what}, then the run was paused", full)
    if view.state == "paused":
        return wrong(f"{what}, then the run was paused", f"{view.reason}; {SHARED}")
    if view.state == "finished" and not tries and view.stored == view.spec.total:
        return well(f"{what}, through dispatcher, engine, capture, watcher and writer")
    if tries:
        return wrong(f"{what}, attempts that brought no row: {tries}", _advice(next(iter(view.reasons))))
    if view.waiting_for:
        return wrong(f"{what}, the run waits", f"{view.waiting_for}; {SHARED}")
    return wrong(what, _stuck(view, states))


def _advice(reason: str) -> str:
    if reason.startswith("http_") or reason in ("timeout", "connection", "bad_answer"):
        return "the dispatcher's log says what the engine answered; does the dispatcher reach the engine itself?"
    if reason == "no_dump":
        return "the engine answered and its dump never came: see the engine's log for headrace's lines"
    return explain(reason, "see the logs of the engine and the watcher")


def _stuck(view: RunView, states: Counter[str]) -> str:
    if states["captured"]:
        return "dumps were proven and are not stored: the writer's log says why; is it as fast as --timeout asks?"
    if states["in_flight"]:
        return "they were sent and no dump was proven yet: the engine is busy (a longer --timeout), or see its log"
    if view.fed == 0 and view.cursor == 0:
        return "no dispatcher read the samples: see its log"
    return "they were not sent: other runs or requests fill the site, or see the dispatcher's log"


def _sample(number: int, prompt: Prompt) -> str:
    ids = list(prompt.token_ids)
    return json.dumps({"id": f"canary-{number}", "input_ids": ids, "loss_mask": [1] * len(ids)}) + "\n"


def _stand_in(folder: Path, site: Site) -> Path:
    """As much of a checkpoint as samples of token ids need, by the site's own account."""
    folder.mkdir()
    sizes = {"num_hidden_layers": max(site.boundaries), "hidden_size": site.hidden_size, "vocab_size": HIGHEST_ID + 1}
    (folder / "config.json").write_text(json.dumps(sizes))
    return folder

"""`headrace demo`: everything on one machine, real conversations, a real model, every row verified."""

from __future__ import annotations

import fcntl
import json
import shutil
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.resources import files
from pathlib import Path
from types import FrameType
from typing import IO

from rich.text import Text

from headrace.bus import Bus
from headrace.bus.values import RunView
from headrace.errors import Conflict, UsageError
from headrace.settings import load_settings
from headrace_cli import console
from headrace_cli.follow import follow
from headrace_cli.stack import SERVICES, Stack, StackConfig
from headrace_cli.submit import SMOLLM2, resolve_model, submit_run
from headrace_cli.verify import render, verify

RUN = "demo"
_MARK = ".headrace-demo"  # a folder that has it is a demo's; locked while the demo runs
_INTERRUPTED = 130
_READY_SECONDS = 180.0


def run_demo(folder: Path, *, fresh: bool, limit: int | None, model: str = SMOLLM2) -> None:
    """Run the demo in `folder` and say where the dataset is; Ctrl-C or SIGTERM ends every service, and then this.

    `model` is a checkpoint folder or the word of a known model. The Redis that the settings name is used; where they
    name none, one is started in the folder.

    Raises:
        UsageError: the folder holds something else.
        Conflict: another demo runs in the folder.
        VerificationFailed: a row is wrong.
        RunIncomplete: samples are open.
    """
    interrupts = _Interrupts()
    try:
        with _own_folder(folder, fresh=fresh):
            _run(folder, limit, model, interrupts)
    except KeyboardInterrupt:
        again = "the same command without --fresh" if fresh else "the same command"
        console.err.print(f"stopped; every service has ended. To go on where it was: {again}.")
        sys.exit(_INTERRUPTED)


def _run(folder: Path, limit: int | None, model: str, interrupts: _Interrupts) -> None:
    clock = _Clock()
    with console.out.status(Text(f"checkpoint of {model}")):
        checkpoint = (resolve_model(model) or Path(model)).absolute()
    clock.lap("model")
    name = model if model == SMOLLM2 else str(checkpoint)
    with Stack(_config(folder, checkpoint, name)) as stack:
        view = _extract(stack, _write_run_file(folder, name), clock, limit, interrupts)
    interrupts.check()
    clock.lap("stop")
    output = Path(view.spec.output)
    with console.progress_bar() as bar:
        task = bar.add_task("verifying every row", total=None)

        def progress(done: int, total: int) -> None:
            interrupts.check()
            bar.update(task, completed=done, total=total)

        report = verify(
            output,
            model=checkpoint,
            sample=0,
            all_rows=True,
            semantic=True,
            tolerance=None,
            progress=progress,
        )
    clock.lap("verify")
    console.out.print(render(report))
    console.out.print(f"time: {clock}")
    console.out.print(console.books(view))
    report.require_whole()
    _say_next(folder, output)


def _config(folder: Path, checkpoint: Path, name: str) -> StackConfig:
    settings = load_settings()
    given = "redis_url" in settings.model_fields_set
    return StackConfig(
        folder=folder,
        model=checkpoint,
        model_name=name,
        redis_url=settings.redis_url if given else "",
        redis_password=settings.redis_password.get_secret_value() if given else "",
    )


def _extract(stack: Stack, run_file: Path, clock: _Clock, limit: int | None, interrupts: _Interrupts) -> RunView:
    def check() -> None:
        interrupts.check()
        stack.check()

    with console.out.status("starting") as status:
        stack.start("redis")
        stack.wait_ready("redis", _READY_SECONDS, interrupts.check)
        for name in SERVICES[1:]:
            stack.start(name)
        for name in SERVICES[1:]:
            status.update(f"waiting for the {name}")
            stack.wait_ready(name, _READY_SECONDS, interrupts.check)
    clock.lap("start")
    bus = stack.bus()
    try:
        view = _submit(bus, run_file, limit, own_redis=not stack.config.redis_url)
        if view.state == "paused":  # by an earlier call of the demo, whose fault is mended by now or shows again
            bus.runs.activate(view.spec.run)
        if view.state != "finished":
            view = follow(bus, view.spec.run, check)
    finally:
        bus.close()
    clock.lap("extract")
    return view


def _submit(bus: Bus, run_file: Path, limit: int | None, *, own_redis: bool) -> RunView:
    """Submit, with the demo's own ways out of a conflict: its run file is written anew by each call."""
    try:
        return submit_run(bus, run_file, start=0, end=None, limit=limit, engine_check=True)
    except Conflict as error:
        database = "" if own_redis else ", HEADRACE_REDIS_URL another database"
        ways = f"--fresh starts over, --folder names another place{database}"
        raise Conflict(f"{error} (a demo was here with other options: {ways})") from error


@contextmanager
def _own_folder(folder: Path, *, fresh: bool) -> Iterator[None]:
    """Hold the demo's folder for this process, emptied if `fresh`."""
    with _open_mark(folder) as held:
        try:
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise Conflict(f"another demo runs in {folder}; wait for it, or choose another --folder") from error
        if fresh:
            for entry in folder.iterdir():
                if entry.is_dir() and not entry.is_symlink():
                    shutil.rmtree(entry)
                elif entry.name != _MARK:  # without it the folder would not be the demo's if this is interrupted
                    entry.unlink()
        yield


def _open_mark(folder: Path) -> IO[str]:
    mark = folder / _MARK
    try:
        if folder.exists() and any(folder.iterdir()) and not mark.is_file():
            raise UsageError(f"{folder} holds something else than a demo; choose another with --folder")
        folder.mkdir(parents=True, exist_ok=True)
        return mark.open("a")
    except OSError as error:
        raise UsageError(f"{folder} cannot be used: {error.strerror}; choose another with --folder") from error


def _write_run_file(folder: Path, model: str) -> Path:
    data = folder / "conversations.jsonl"
    data.write_bytes((files("headrace_cli") / "data" / "conversations.jsonl").read_bytes())
    run_file = folder / "demo.toml"
    run_file.write_text(
        f"""# The demo's run: copy it for your own.
[run]
name = "{RUN}"
data = "conversations.jsonl"   # messages, conversations, or input_ids and loss_mask
output = "dataset"
model = {json.dumps(model):<22} # a checkpoint folder: its tokenizer and chat template
boundaries = "eagle3"          # 2, L//2, L-3
final_state = "pre_norm"
max_length = 4096
"""
    )
    return run_file


def _say_next(folder: Path, output: Path) -> None:
    console.out.print(
        f"\nThe dataset is in {output}: one safetensors file a sample under rows/, its books in manifest/."
    )
    console.out.print(f"Look at it again:   headrace verify {output} --all")
    console.out.print(f"Your own samples:   copy {folder / 'demo.toml'}, and see 'Your own run' in the README.")
    console.out.print(f"Logs of the demo:   {folder / 'logs'}")


class _Interrupts:
    """Ctrl-C and SIGTERM, as KeyboardInterrupt.

    They are remembered, too: one that comes while Python runs a callback whose exceptions it throws away, as those
    around a fork, would be lost.
    """

    def __init__(self) -> None:
        self._seen = False
        signal.signal(signal.SIGINT, self._on_signal)
        signal.signal(signal.SIGTERM, self._on_signal)

    def check(self) -> None:
        """Raise KeyboardInterrupt if a signal came."""
        if self._seen:
            raise KeyboardInterrupt

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._seen = True
        raise KeyboardInterrupt


class _Clock:
    """What each step cost."""

    def __init__(self) -> None:
        self._last = time.monotonic()
        self._laps: list[str] = []

    def lap(self, name: str) -> None:
        now = time.monotonic()
        self._laps.append(f"{name} {now - self._last:.1f} s")
        self._last = now

    def __str__(self) -> str:
        return " · ".join(self._laps)

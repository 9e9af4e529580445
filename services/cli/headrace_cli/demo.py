"""`headrace demo`: everything on one machine, real conversations, a real model, every row verified."""

from __future__ import annotations

import shutil
import signal
import sys
import time
from importlib.resources import files
from pathlib import Path
from types import FrameType

from headrace.bus.values import RunView
from headrace.errors import UsageError, VerificationFailed
from headrace_cli import console
from headrace_cli.follow import follow
from headrace_cli.stack import SERVICES, Stack, StackConfig
from headrace_cli.submit import submit_run
from headrace_cli.verify import render, verify
from headrace_engine.checkpoint import smollm2_checkpoint

RUN = "demo"
_MARK = "redis-password"  # a folder that has it is a demo's
_READY_SECONDS = 180.0


def run_demo(folder: Path, *, fresh: bool, limit: int | None) -> None:
    """Run the demo in `folder` and say where the dataset is.

    Raises:
        UsageError: the folder holds something else.
        VerificationFailed: a row is wrong.
    """
    _prepare_folder(folder, fresh=fresh)
    signal.signal(signal.SIGTERM, _interrupt)
    clock = _Clock()
    with console.out.status("SmolLM2-135M-Instruct: checkpoint"):
        model = smollm2_checkpoint()
    clock.lap("model")
    config = StackConfig(folder=folder, model=model, model_name="smollm2")
    try:
        with Stack(config) as stack:
            view = _extract(stack, folder, clock, limit)
        clock.lap("stop")
    except KeyboardInterrupt:
        console.err.print("stopped; every service has ended. The same command goes on where it was.")
        sys.exit(130)
    output = Path(view.spec.output)
    with console.progress_bar() as bar:
        task = bar.add_task("verifying every row", total=None)
        report = verify(
            output,
            model=model,
            sample=0,
            all_rows=True,
            semantic=True,
            tolerance=None,
            progress=lambda done, total: bar.update(task, completed=done, total=total),
        )
    clock.lap("verify")
    console.out.print(render(report))
    console.out.print(f"time: {clock}")
    console.out.print(console.books(view))
    if not report.ok:
        raise VerificationFailed(f"{output}: {sum(report.counts.values())} problems; see above")
    _say_next(folder, output)


def _extract(stack: Stack, folder: Path, clock: _Clock, limit: int | None) -> RunView:
    with console.out.status("starting") as status:
        stack.start("redis")
        stack.wait_ready("redis", _READY_SECONDS)
        for name in SERVICES[1:]:
            stack.start(name)
        for name in SERVICES[1:]:
            status.update(f"waiting for the {name}")
            stack.wait_ready(name, _READY_SECONDS)
    clock.lap("start")
    bus = stack.bus()
    try:
        run_file = _write_run_file(folder)
        view = submit_run(bus, run_file, start=0, end=None, limit=limit, engine_check=True)
        if view.state != "finished":
            view = follow(bus, view.spec.run, stack.check)
    finally:
        bus.close()
    clock.lap("extract")
    return view


def _prepare_folder(folder: Path, *, fresh: bool) -> None:
    if folder.exists() and any(folder.iterdir()) and not (folder / _MARK).is_file():
        raise UsageError(f"{folder} holds something else than a demo; choose another with --folder")
    if fresh and folder.exists():
        shutil.rmtree(folder)
    folder.mkdir(parents=True, exist_ok=True)


def _write_run_file(folder: Path) -> Path:
    data = folder / "conversations.jsonl"
    data.write_bytes((files("headrace_cli") / "data" / "conversations.jsonl").read_bytes())
    run_file = folder / "demo.toml"
    run_file.write_text(
        f"""# The demo's run: copy it for your own.
[run]
name = "{RUN}"
data = "conversations.jsonl"   # messages, conversations, or input_ids and loss_mask
output = "dataset"
model = "smollm2"              # a checkpoint folder: its tokenizer and chat template
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


def _interrupt(number: int, frame: FrameType | None) -> None:
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

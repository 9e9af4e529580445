"""`headrace demo` as a user runs it: to its end, interrupted, and with a Redis of the user's own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from headrace.bus import Bus
from tests.support.pipeline import lines_of
from tests.support.waiting import wait_until

pytestmark = [
    pytest.mark.pipeline,
    pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="looks for processes in /proc"),
]

SAMPLES = 12
SECONDS = 120.0


@contextmanager
def demo(folder: Path, model: Path, limit: int = SAMPLES, **environ: str) -> Iterator[subprocess.Popen[str]]:
    """The demo over a tiny model, in a process group of its own, as a terminal's foreground job is."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("HEADRACE_")}
    options = ("demo", "--folder", folder, "--limit", str(limit), "--model", model)
    process = subprocess.Popen(
        [sys.executable, "-c", "from headrace_cli.main import run; run()", *options],
        env={**clean, **environ},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate(timeout=20)


def end_of(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    out, errors = process.communicate(timeout=SECONDS)
    return process.returncode, out, errors


def while_it_lives(process: subprocess.Popen[str], reached: Callable[[], bool]) -> None:
    """Wait until the demo has come so far."""

    def so_far() -> bool:
        assert process.poll() is None, process.communicate()
        return reached()

    wait_until(so_far, SECONDS, "a stage of the demo")


def processes_of(folder: Path) -> list[str]:
    """Commands of the living processes whose environment or command names the folder."""
    found = []
    for place in Path("/proc").glob("[0-9]*"):
        try:
            command = (place / "cmdline").read_bytes()
            if os.fsencode(folder) in command + (place / "environ").read_bytes():
                found.append(command.replace(b"\0", b" ").decode())
        except OSError:  # it ended just now, or is not ours
            continue
    return found


def test_an_interrupted_demo_leaves_no_process_and_the_same_command_goes_on(tmp_path: Path, tiny: Path) -> None:
    folder = tmp_path / "demo"
    stages: list[tuple[Callable[[], bool], signal.Signals]] = [
        ((folder / "logs" / "redis.log").exists, signal.SIGINT),
        ((folder / "logs" / "dispatcher.log").exists, signal.SIGTERM),
        (lambda: bool(lines_of(folder / "dataset")), signal.SIGINT),
    ]
    for reached, number in stages:
        with demo(folder, tiny) as process:
            while_it_lives(process, reached)
            os.killpg(process.pid, number)
            code, _, errors = end_of(process)
        assert code == 130, errors
        assert "To go on where it was: the same command" in errors
        assert processes_of(folder) == []
    with demo(folder, tiny) as process:
        code, out, errors = end_of(process)
    assert code == 0, errors
    assert f"stored {SAMPLES} / {SAMPLES} · rejected 0 · failed 0 · mismatches 0" in out
    assert processes_of(folder) == []
    assert sorted(line.ordinal for line in lines_of(folder / "dataset")) == list(range(SAMPLES))


def test_a_given_redis_is_used_and_no_other_is_started(tmp_path: Path, tiny: Path, redis_url: str, bus: Bus) -> None:
    folder = tmp_path / "demo"
    with demo(folder, tiny, HEADRACE_REDIS_URL=redis_url) as process:
        code, out, errors = end_of(process)
    assert code == 0, errors
    assert f"stored {SAMPLES} / {SAMPLES}" in out
    assert bus.runs.names() == ["demo"]
    assert not (folder / "logs" / "redis.log").exists()
    with demo(folder, tiny, limit=5, HEADRACE_REDIS_URL=redis_url) as process:
        code, _, errors = end_of(process)
    assert (code, len(errors.splitlines())) == (4, 1)
    for word in ("12", "5", "--fresh", "--folder", "HEADRACE_REDIS_URL"):
        assert word in errors


def test_a_given_redis_that_is_away_is_said_at_once(tmp_path: Path, tiny: Path) -> None:
    with demo(tmp_path / "demo", tiny, HEADRACE_REDIS_URL="redis://127.0.0.1:1/0") as process:
        code, _, errors = end_of(process)
    assert (code, len(errors.splitlines())) == (3, 1)
    assert "no Redis at redis://127.0.0.1:1/0" in errors


def test_a_model_that_is_none_is_said_as_it_was_written(tmp_path: Path) -> None:
    with demo(tmp_path / "demo", tmp_path / "[/bold]") as process:
        code, _, errors = end_of(process)
    assert (code, "[/bold] holds no config.json" in errors) == (3, True)
    assert "Traceback" not in errors


def test_a_folder_that_holds_something_else_or_another_demo_is_refused(tmp_path: Path, tiny: Path) -> None:
    folder = tmp_path / "demo"
    with demo(folder, tiny) as first:
        while_it_lives(first, (folder / "logs" / "redis.log").exists)
        with demo(folder, tiny) as second:
            code, _, errors = end_of(second)
        assert (code, "another demo runs in" in errors) == (4, True)
        first.send_signal(signal.SIGINT)
        assert end_of(first)[0] == 130
    (tmp_path / "thesis.doc").touch()
    with demo(tmp_path, tiny) as process:
        code, _, errors = end_of(process)
    assert (code, "holds something else than a demo" in errors) == (2, True)

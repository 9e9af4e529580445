"""`headrace doctor URL` beside real services: yes to a right engine, no to one whose states are another's."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from headrace.bus import Bus, keys
from headrace_cli.stack import Stack
from headrace_cli.verify import verify
from tests.support.commands import CLI
from tests.support.engine import EngineProcess
from tests.support.faults import hits_of, write_plan
from tests.support.pipeline import (
    READY_SECONDS,
    assert_nothing_left,
    make_stack,
    running,
    stack_config,
    stopped,
)
from tests.support.waiting import wait_until

pytestmark = pytest.mark.pipeline

BOUND = 90.0  # seconds: of a doctor that is asked for less


@contextmanager
def doctor(stack: Stack, folder: Path, *arguments: str | Path, without: str = "") -> Iterator[subprocess.Popen[str]]:
    """`headrace doctor` about the stack's engine, in a folder, as if a module were not installed; killed at the end."""
    folder.mkdir(exist_ok=True)
    clean = {name: value for name, value in os.environ.items() if not name.startswith("HEADRACE_")}
    password = str(stack.folder / "redis-password")
    environ = {**clean, "HEADRACE_REDIS_URL": stack.redis_url, "HEADRACE_REDIS_PASSWORD_FILE": password}
    code = f"import sys; sys.modules[{without!r}] = None; {CLI}" if without else CLI
    command = [sys.executable, "-c", code, "doctor", stack.engine_url, *map(str, arguments)]
    process = subprocess.Popen(
        command, env=environ, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate(timeout=20)


def ask(stack: Stack, folder: Path, *arguments: str | Path, without: str = "") -> tuple[int, str, str]:
    """Exit code, output and complaints of a doctor."""
    with doctor(stack, folder, *arguments, without=without) as process:
        told, complaints = process.communicate(timeout=BOUND)
        assert "Traceback" not in complaints, complaints
        return process.returncode, told, complaints


def the_run(bus: Bus) -> Any:
    """The doctor's run, as soon as there is one."""
    (name,) = wait_until(bus.runs.names, 60, "the doctor's run")
    return bus.runs.get(name)


def test_a_right_engine_gets_a_yes_and_keeps_no_trace(tmp_path: Path, tiny: Path) -> None:
    stack = make_stack(tmp_path / "stack", tiny)
    with running(stack) as bus:
        code, told, complaints = ask(stack, tmp_path / "here", "--model", tiny)
        assert (code, complaints) == (0, "")
        assert "?   " not in told
        assert "fix " not in told
        assert told.splitlines()[-1].startswith(f"yes: {stack.engine_url}")
        assert "7 of 7 stored" in told
        assert "gives the server's own next token in 7 of 7 rows" in told
        assert list((tmp_path / "here").iterdir()) == []
        run = the_run(bus).spec.run
        assert_nothing_left(stack, bus, run)
        assert 0 < bus.redis.pttl(keys.run(run)) <= 3_600_000
        # The demo's own way: nothing but the engine's address, and what cannot be told then.
        code, told, complaints = ask(stack, tmp_path / "here", "--keep", "--output", tmp_path / "kept")
        assert (code, complaints) == (0, "")
        assert told.splitlines()[-1].startswith(f"yes for {stack.engine_url}, but for what cannot be told from here")
        assert "lm_head(final) against the server's own next tokens: tiny is no checkpoint folder here" in told
        for module, untold in (("torch", "lm_head(final) against"), ("numpy", "that the rows are right")):
            code, told, complaints = ask(stack, tmp_path / "here", "--model", tiny, without=module)
            assert (code, complaints) == (0, "")
            assert f"?    {untold}" in told
            assert "headrace[verify]" in told
            assert told.splitlines()[-1].startswith("yes for ")
        code, _, complaints = ask(stack, Path("/proc"))
        assert code == 2
        assert "give --output a folder" in complaints
    kept = tmp_path / "kept"
    report = verify(kept, model=tiny, sample=0, all_rows=True, semantic=False, tolerance=None, progress=None)
    assert (report.stored, report.ok) == (7, True)


def test_the_states_of_another_request_are_a_no(tmp_path: Path, tiny: Path) -> None:
    plan = write_plan(tmp_path / "plan.toml", {"kind": "other_states"})
    stack = make_stack(tmp_path / "stack", tiny, engine=("--faults", str(plan)))
    with running(stack):
        code, told, complaints = ask(stack, tmp_path / "here", "--model", tiny)
    assert len(hits_of(plan)) == 7
    assert code == 5, told
    assert complaints.startswith("headrace: no: rows: 7 problems")
    assert "7 of 7 stored" in told, "no verdict can see it"
    assert "fix  lm_head(final) of each last token is not what the server computes" in told


def test_a_final_state_of_another_place_is_a_no(tmp_path: Path, tiny: Path) -> None:
    plan = write_plan(tmp_path / "plan.toml", {"kind": "swapped_boundaries"})
    stack = make_stack(tmp_path / "stack", tiny, engine=("--boundaries", "4", "--faults", str(plan)))
    with running(stack):
        code, told, complaints = ask(stack, tmp_path / "here", "--model", tiny)
    assert len(hits_of(plan)) == 7
    assert code == 5, told
    assert "final matches layer 4's input better" in complaints
    assert "fix  lm_head(final) of each last token is not what the server computes" in told


def test_dumps_that_are_refused_are_a_no_with_their_reason(tmp_path: Path, tiny: Path) -> None:
    plan = write_plan(tmp_path / "plan.toml", {"kind": "other_tokens", "ordinals": [2], "times": 2})
    stack = make_stack(tmp_path / "stack", tiny, engine=("--faults", str(plan)))
    with running(stack):
        code, told, complaints = ask(stack, tmp_path / "here", "--model", tiny)
    assert code == 5, told
    assert "dumps refused: token_content 2" in complaints
    assert "the engine changes prompts" in complaints
    assert list((tmp_path / "here").iterdir()) == []


def test_an_engine_without_the_plugin_is_a_no_with_the_watchers_words(tmp_path: Path, tiny: Path) -> None:
    with EngineProcess(tmp_path / "engine", "--model", str(tiny), "--model-name", "tiny") as engine:
        engine.wait_ready()
        stack = Stack(replace(stack_config(tmp_path / "stack", tiny), engine_url=engine.url))
        with stack:
            stack.start("redis")
            stack.wait_ready("redis", READY_SECONDS)
            for name in ("watcher", "writer", "dispatcher"):
                stack.start(name)
            bus = stack.bus()
            wait_until(bus.sites.unregistered, READY_SECONDS, "the watcher's reason")
            wait_until(bus.dispatchers.alive, READY_SECONDS, "the dispatcher")
            bus.close()
            code, _, complaints = ask(stack, tmp_path / "here")
    assert code == 3
    assert "no engine has started on this dump folder: is the plugin in the server's environment" in complaints


def test_what_stands_still_is_waited_for_no_longer_than_asked(tmp_path: Path, tiny: Path) -> None:
    stack = make_stack(tmp_path / "stack", tiny, environ={"HEADRACE_SITE_TTL_SECONDS": "60"})
    with running(stack) as bus:
        with stopped(stack, "engine"):
            code, _, complaints = ask(stack, tmp_path / "here", "--timeout", "2")
            assert code == 3
            assert "does not answer in 2 s" in complaints
            assert bus.runs.names() == []
        with stopped(stack, "writer"):
            code, told, complaints = ask(stack, tmp_path / "here", "--timeout", "4")
            assert code == 3
            assert "dumps were proven and are not stored" in complaints
            assert "left behind: something of run" in told
            assert len(list((tmp_path / "here").iterdir())) == 1
        assert_nothing_left(stack, bus, "none")


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_one_that_is_stopped_takes_its_run_back(tmp_path: Path, tiny: Path, number: int, code: int) -> None:
    stack = make_stack(tmp_path / "stack", tiny)
    with running(stack) as bus, stopped(stack, "writer"), doctor(stack, tmp_path / "here") as process:
        run = the_run(bus).spec.run
        wait_until(lambda: bus.runs.states(run)["captured"], 60, "a proven dump")
        process.send_signal(number)
        _, complaints = process.communicate(timeout=BOUND)
        assert process.returncode == code, complaints
        assert complaints.startswith(f"left behind: something of run {run} is still under way")
        assert len(complaints.splitlines()) == 1
        view = bus.runs.get(run)
        assert view is not None
        assert view.state == "cancelled"
        assert bus.redis.pttl(keys.run(run)) > 0


def test_a_redis_that_goes_away_in_the_middle_is_a_no(tmp_path: Path, tiny: Path) -> None:
    stack = make_stack(tmp_path / "stack", tiny)
    with running(stack) as bus, stopped(stack, "writer"), doctor(stack, tmp_path / "here") as process:
        run = the_run(bus).spec.run
        stack.kill("redis")
        told, complaints = process.communicate(timeout=BOUND)
    assert process.returncode == 3, complaints
    assert complaints.startswith("headrace: no: the canaries: ")
    assert f"later: headrace cancel {run}" in told

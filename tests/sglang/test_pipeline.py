"""Whole runs over the real SGLang: submitted, captured, stored, and every row's states recomputed."""

from __future__ import annotations

import shutil
from importlib.resources import files
from pathlib import Path

import pytest

from headrace.bus.values import RunView
from headrace_cli.stack import Stack
from tests.sglang.server import LLAMA_LOGITS, LLAMA_OLDEST, QWEN3_TP2, SMOL, SglangServer
from tests.support.commands import headrace
from tests.support.pipeline import (
    assert_nothing_left,
    assert_right,
    logged,
    running,
    submit,
    wait_finished,
    write_run_file,
    write_samples,
)

CONVERSATIONS = 60
SECONDS = 600.0


def assert_no_attempt_was_wasted(stack: Stack, view: RunView) -> None:
    """Each sample was stored by its first attempt: nothing was refused, lost, or captured twice."""
    assert (view.mismatches, dict(view.reasons)) == (0, {})
    assert len(logged(stack, "watcher", "captured")) == view.spec.total


@pytest.mark.served(SMOL)
def test_the_60_conversations_on_smollm2_as_a_user_submits_and_verifies_them(
    tmp_path: Path, server: SglangServer
) -> None:
    shutil.copy(str(files("headrace_cli") / "data" / "conversations.jsonl"), tmp_path / "conversations.jsonl")
    model = server.card().model
    run_file = tmp_path / "run.toml"
    run_file.write_text(
        f'[run]\nname = "real"\ndata = "conversations.jsonl"\noutput = "dataset"\nmodel = "smollm2"\n'
        f'engine_model = "{model}"\nboundaries = "eagle3"\nfinal_state = "pre_norm"\nmax_length = 4096\n'
    )
    stack = server.stack(tmp_path / "stack")
    with running(stack) as bus:
        redis = {
            "HEADRACE_REDIS_URL": stack.redis_url,
            "HEADRACE_REDIS_PASSWORD_FILE": str(stack.folder / "redis-password"),
        }
        done = headrace("submit", run_file, "--wait", timeout=SECONDS, **redis)
        assert done.returncode == 0, (done.stdout, done.stderr)
        view = bus.runs.get("real")
        assert view is not None
        assert (view.state, view.stored, view.spec.total) == ("finished", CONVERSATIONS, CONVERSATIONS)
        assert_no_attempt_was_wasted(stack, view)
        assert_nothing_left(stack, bus, "real")
    checked = headrace("verify", tmp_path / "dataset", "--all", timeout=SECONDS)
    assert checked.returncode == 0, (checked.stdout, checked.stderr)
    assert f"{CONVERSATIONS} stored" in checked.stdout


@pytest.mark.parametrize(
    "samples",
    [
        pytest.param(60, marks=pytest.mark.served(LLAMA_LOGITS), id="logits adapter"),
        pytest.param(24, marks=pytest.mark.served(QWEN3_TP2), id="two ranks, bfloat16"),
        pytest.param(40, marks=pytest.mark.served(LLAMA_OLDEST), id="0.5.16"),
    ],
)
def test_random_prompts_are_stored_whole_and_right(tmp_path: Path, server: SglangServer, samples: int) -> None:
    data = write_samples(tmp_path / "data.jsonl", samples, longest=600)
    run_file = write_run_file(tmp_path, data, server.model, engine_model=server.card().model)
    stack = server.stack(tmp_path / "stack")
    with running(stack) as bus:
        submit(bus, run_file)
        view = wait_finished(bus, "test", SECONDS)
        assert_no_attempt_was_wasted(stack, view)
        assert_nothing_left(stack, bus, "test")
    assert_right(view, tmp_path / "dataset", server.model)

"""`headrace doctor URL` about the real SGLang: yes to every part, or the flag that is in the way."""

from __future__ import annotations

import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from headrace_cli.stack import Stack
from tests.sglang.server import LLAMA_LOGITS, QWEN3_TP2, SMOL, SglangServer
from tests.support.commands import headrace
from tests.support.pipeline import READY_SECONDS, assert_nothing_left, running
from tests.support.waiting import wait_until

SECONDS = 300.0


def ask(stack: Stack, server: SglangServer, folder: Path) -> subprocess.CompletedProcess[str]:
    """`headrace doctor` about the server."""
    redis = {
        "HEADRACE_REDIS_URL": stack.redis_url,
        "HEADRACE_REDIS_PASSWORD_FILE": str(stack.folder / "redis-password"),
    }
    return headrace("doctor", server.url, "--output", folder / "rows", timeout=SECONDS, **redis)


@pytest.mark.parametrize(
    "dtype",
    [
        pytest.param("float32", marks=pytest.mark.served(SMOL)),
        pytest.param("bfloat16", marks=pytest.mark.served(QWEN3_TP2)),
    ],
)
def test_a_right_server_gets_a_yes_to_every_part(tmp_path: Path, server: SglangServer, dtype: str) -> None:
    stack = server.stack(tmp_path / "stack")
    with running(stack) as bus:
        done = ask(stack, server, tmp_path)
        assert done.returncode == 0, (done.stdout, done.stderr)
        (run,) = bus.runs.names()
        assert_nothing_left(stack, bus, run)
    assert done.stderr == ""
    assert f" {dtype} tp{server.config.tp} " in done.stdout
    assert "?    " not in done.stdout, "the checkpoint's path is here, so all can be told"
    assert "states recomputed in float32" in done.stdout
    assert "gives the server's own next token in 7 of 7 rows" in done.stdout
    assert done.stdout.splitlines()[-1].startswith(f"yes: {server.url}")
    assert not (tmp_path / "rows").exists()


@pytest.mark.served(replace(LLAMA_LOGITS, flags=("--allow-auto-truncate",)))
def test_a_flag_in_the_way_is_named_by_plugin_watcher_and_doctor(tmp_path: Path, server: SglangServer) -> None:
    assert server.generate([5, 6, 7], max_new_tokens=1).status_code == 200, "the server itself runs on"
    stack = server.stack(tmp_path / "stack")
    with stack:
        for name in ("redis", "watcher", "writer", "dispatcher"):
            stack.start(name)
        stack.wait_ready("redis", READY_SECONDS)
        bus = stack.bus()
        (entry,) = wait_until(bus.sites.unregistered, READY_SECONDS, "the watcher's reason")
        wait_until(bus.dispatchers.alive, READY_SECONDS, "the dispatcher")
        bus.close()
        done = ask(stack, server, tmp_path)
    assert "the engine captures nothing" in entry.why
    assert "--allow-auto-truncate" in entry.why
    assert done.returncode == 3, (done.stdout, done.stderr)
    assert done.stderr.startswith("headrace: no: server flag --allow-auto-truncate")
    assert entry.why in done.stdout

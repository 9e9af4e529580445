from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

import headrace
from headrace.errors import Conflict, UsageError
from headrace.service import Health, serving
from tests.support.http import get
from tests.support.server import free_port
from tests.support.waiting import wait_until

CHILD = """
from headrace import logs
from headrace.errors import Conflict
from headrace.service import run

def loop(service):
    service.health.set("redis", "no Redis at 10.0.0.1")
    service.health.set("folder")
    logs.get("child").info("up", answer=42)
    if service.settings.window == 2:
        raise Conflict("the place is taken; choose another")
    service.health.set("redis")
    service.stop.wait()

run("child", loop, "redis", "folder", about="does what a test needs.")
"""


@contextmanager
def child(*arguments: str, **variables: str) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [sys.executable, "-c", CHILD, *arguments],
        env={**os.environ, **{f"HEADRACE_{name}": value for name, value in variables.items()}},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate(timeout=20)


def end_of(process: subprocess.Popen[str]) -> tuple[int, str]:
    _, errors = process.communicate(timeout=20)
    return process.returncode, errors


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_service_serves_its_health_and_ends_with_0_on_a_signal(number: signal.Signals) -> None:
    port = free_port()
    with child(HEALTH_PORT=str(port)) as process:
        wait_until(lambda: get(port, "/readyz") == (200, "ready\n"), 20, "the child to be ready")
        assert get(port, "/healthz") == (200, "ok\n")
        status, metrics = get(port, "/metrics?name=x")
        assert status == 200
        assert "python_info" in metrics
        assert get(port, "/other")[0] == 404
        process.send_signal(number)
        code, errors = end_of(process)
    assert code == 0
    record = json.loads(errors.splitlines()[0])
    assert (record["event"], record["service"], record["level"], record["answer"]) == ("up", "child", "info", 42)


def test_an_error_of_ours_is_one_line_and_its_own_exit_code() -> None:
    with child(WINDOW="2", LOG_LEVEL="error") as process:
        assert end_of(process) == (4, "headrace-child: the place is taken; choose another\n")


def test_a_wrong_setting_is_one_line_and_exit_code_2() -> None:
    with child(WINDOW="none") as process:
        code, errors = end_of(process)
    assert code == 2
    assert errors.startswith("headrace-child: ")
    assert "HEADRACE_WINDOW" in errors
    assert errors.count("\n") == 1


def test_a_port_that_is_taken_is_named_with_its_variable() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with child(HEALTH_PORT=str(port)) as process:
            code, errors = end_of(process)
        assert code == 4
        assert f"port {port}" in errors
        assert "HEADRACE_HEALTH_PORT" in errors
        assert errors.count("\n") == 1
        with pytest.raises(Conflict, match="HEADRACE_HEALTH_PORT"), serving("127.0.0.1", port, Health()):
            pass


@pytest.mark.parametrize("host", ["192.0.2.1", "no-such-host.invalid", "a..b"])
def test_a_host_that_is_not_this_machine_is_a_usage_error(host: str) -> None:
    with pytest.raises(UsageError, match="HEADRACE_HEALTH_HOST"), serving(host, free_port(), Health()):
        pass


def answer_of(*arguments: str) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of a service that must not start."""
    with child(*arguments) as process:
        out, errors = process.communicate(timeout=20)
    return process.returncode, out, errors


def test_help_and_version_start_nothing() -> None:
    for flag in ("--help", "-h"):
        code, out, errors = answer_of(flag)
        assert (code, errors, out.count("\n")) == (0, "", 1)
        assert out.startswith("headrace-child does what a test needs. ")
        assert "HEADRACE_CONFIG" in out
    assert answer_of("--version") == (0, f"headrace-child {headrace.__version__}\n", "")


@pytest.mark.parametrize("arguments", [("--port", "5"), ("start",), ("--help", "--version"), ("",)])
def test_any_other_argument_is_refused_in_one_line(arguments: tuple[str, ...]) -> None:
    code, out, errors = answer_of(*arguments)
    assert (code, out, errors.count("\n")) == (2, "", 1)
    assert f"{' '.join(arguments)!r}: no arguments are taken" in errors
    assert "--help" in errors


def test_readiness_names_each_part_that_is_not_ready() -> None:
    port, health = free_port(), Health("redis", "folder")
    with serving("127.0.0.1", port, health):
        assert get(port, "/readyz") == (503, "redis: starting\nfolder: starting\n")
        health.set("redis")
        health.set("folder", "no room")
        assert get(port, "/readyz") == (503, "folder: no room\n")
        assert health.problems() == {"folder": "no room"}
        health.set("folder")
        assert get(port, "/readyz") == (200, "ready\n")
        assert get(port, "/healthz") == (200, "ok\n")
    assert get(port, "/healthz")[0] == 0


def test_a_client_that_sends_nothing_is_let_go(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace.service._REQUEST_SECONDS", 0.1)
    port = free_port()
    with serving("127.0.0.1", port, Health()), socket.create_connection(("127.0.0.1", port), timeout=20) as silent:
        assert silent.recv(1) == b""


def test_port_0_serves_nothing() -> None:
    before = threading.active_count()
    with serving("127.0.0.1", 0, Health()):
        assert threading.active_count() == before

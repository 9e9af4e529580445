from __future__ import annotations

import os
import signal
import socket
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from headrace.errors import Unavailable
from headrace_cli.stack import Stack, StackConfig, free_ports


def test_free_ports_differ_and_are_none_that_an_outgoing_connection_could_take_meanwhile() -> None:
    ports = free_ports(20)
    assert len(set(ports)) == 20
    assert all(1024 <= port < 32_768 for port in ports)
    for port in ports:
        socket.create_server(("127.0.0.1", port)).close()


def test_a_service_that_ended_is_named_in_one_line_with_its_log(tmp_path: Path) -> None:
    config = StackConfig(
        folder=tmp_path / "stack", model=tmp_path / "no model", model_name="tiny", redis_url="redis://x"
    )
    with Stack(config) as stack:
        stack.start("engine")
        with pytest.raises(Unavailable) as caught:
            stack.wait_ready("engine", 60)
    said = str(caught.value)
    assert "engine ended with code 2; the last lines of" in said
    assert str(tmp_path / "stack" / "logs" / "engine.log") in said
    assert "no model" in said
    assert "\n" not in said


@pytest.fixture(params=(signal.SIGINT, signal.SIGTERM))
def interrupting(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A signal that comes at the worst moment: the child lives, and nobody has its process id yet."""
    number: signal.Signals = request.param

    class Interrupted(subprocess.Popen[bytes]):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            thread = threading.Thread(target=os.kill, args=(os.getpid(), number))  # which is not masked
            thread.start()
            thread.join()

    def raising(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(number, raising)
    monkeypatch.setattr(subprocess, "Popen", Interrupted)
    yield
    signal.signal(number, before)


@pytest.mark.usefixtures("interrupting")
def test_a_signal_during_a_start_leaves_no_child_unknown(tmp_path: Path) -> None:
    stack = Stack(StackConfig(folder=tmp_path, model=tmp_path, model_name="tiny", redis_url="redis://x"))
    with pytest.raises(KeyboardInterrupt):
        stack.start("engine")
    process = stack.pid("engine")
    assert os.waitid(os.P_PID, process, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None, "it ended by itself"
    stack.stop()
    with pytest.raises(ProcessLookupError):
        os.kill(process, 0)


def test_an_engine_that_is_there_already_is_used_and_not_started(tmp_path: Path) -> None:
    url = "http://127.0.0.1:9"
    config = StackConfig(folder=tmp_path, model=tmp_path, model_name="", redis_url="redis://x", engine_url=url)
    stack = Stack(config)
    stack.start("engine")
    assert stack.engine_url == url
    assert not stack.ready("engine")
    assert stack.stop() == {}

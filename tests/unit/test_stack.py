from __future__ import annotations

import socket
from pathlib import Path

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

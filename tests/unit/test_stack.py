from __future__ import annotations

import socket

from headrace_cli.stack import free_ports


def test_free_ports_differ_and_are_none_that_an_outgoing_connection_could_take_meanwhile() -> None:
    ports = free_ports(20)
    assert len(set(ports)) == 20
    assert all(1024 <= port < 32_768 for port in ports)
    for port in ports:
        socket.create_server(("127.0.0.1", port)).close()

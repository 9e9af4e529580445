"""What the doctor says of something that is no engine, or one that does not answer as it must."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import pytest

from headrace.errors import Unavailable
from headrace_cli.doctor.server import Server
from tests.support.dispatching import hanging_listener
from tests.support.http import StubServer
from tests.support.server import free_port

LOGIN = b"<!DOCTYPE html>\n<html><title>Please log in</title></html>"


class Answering(StubServer):
    """Answers each path with what a test put there, anything else with 404."""

    def __init__(self) -> None:
        self.answers: dict[str, tuple[int, bytes]] = {}
        self.bodies: list[dict[str, Any]] = []
        super().__init__()

    def answer(self, method: str, path: str, body: bytes) -> tuple[int, bytes]:
        if body:
            self.bodies.append(json.loads(body))
        return self.answers.get(path, (404, b"not found"))


@pytest.fixture
def stub() -> Iterator[Answering]:
    with Answering() as server:
        yield server


def info_of(stub: Answering) -> Any:
    with Server(stub.url, 5) as server:
        return server.info()


def token_of(stub: Answering) -> int:
    with Server(stub.url, 5) as server:
        return server.next_token([3, 4, 5])


def problem_of(stub: Answering) -> str:
    with pytest.raises(Unavailable) as caught:
        info_of(stub)
    return str(caught.value)


@pytest.mark.parametrize("path", ["/server_info", "/get_server_info"])
def test_an_engine_is_known_under_both_names_of_its_path(stub: Answering, path: str) -> None:
    stub.answers[path] = (200, b'{"model_path": "m", "tp_size": 2}')
    assert info_of(stub) == {"model_path": "m", "tp_size": 2}


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        ((200, LOGIN), ("no JSON object", "Please log in", "proxy")),
        ((200, b""), ("no JSON object",)),
        ((200, b"[1]"), ("no JSON object",)),
        ((200, b"\xff\xfe"), ("no JSON object",)),
        ((200, b"{}"), ("model_path",)),
        ((200, b'{"model_path": 7}'), ("model_path",)),
        ((401, b"{}"), ("401", "--api-key")),
        ((503, b"loading"), ("503", "/health")),
        ((500, b"Internal Server Error"), ("500", "Internal Server Error")),
    ],
)
def test_what_is_no_engine_is_named_in_a_line(
    stub: Answering, answer: tuple[int, bytes], words: tuple[str, ...]
) -> None:
    stub.answers["/server_info"] = answer
    problem = problem_of(stub)
    assert stub.url in problem
    assert "\n" not in problem
    for word in words:
        assert word in problem


def test_another_server_is_told_from_an_engine(stub: Answering) -> None:
    assert "is no SGLang server" in problem_of(stub)


def test_nobody_there_is_told_in_few_words() -> None:
    with Server(f"http://127.0.0.1:{free_port()}", 5) as server, pytest.raises(Unavailable) as caught:
        server.info()
    assert "Connection refused" in str(caught.value)
    assert "0x" not in str(caught.value)


def test_a_host_without_an_address_is_told() -> None:
    with Server("http://no-such-host.invalid:30000", 5) as server, pytest.raises(Unavailable, match="cannot be asked"):
        server.info()


def test_what_hangs_is_waited_for_no_longer_than_asked() -> None:
    with hanging_listener() as url, Server(url, 0.2) as server:
        with pytest.raises(Unavailable, match=r"does not answer in 0\.2 s"):
            server.info()
        with pytest.raises(Unavailable, match=r"/generate does not answer in 0\.2 s"):
            server.next_token([1])


def test_the_next_token_is_asked_for_as_a_stranger_does(stub: Answering) -> None:
    stub.answers["/generate"] = (200, b'{"output_ids": [17], "meta_info": {}}')
    assert token_of(stub) == 17
    assert token_of(stub) == 17
    first, second = stub.bodies
    assert first["input_ids"] == [3, 4, 5]
    assert first["rid"] != second["rid"]
    assert not first["rid"].startswith("hr-")
    assert first["extra_key"] == first["rid"]
    assert first["sampling_params"]["max_new_tokens"] == 1
    assert first["sampling_params"]["temperature"] == 0


@pytest.mark.parametrize(
    "answer",
    [b'{"text": "x"}', b'{"output_ids": []}', b'{"output_ids": [1, 2]}', b'{"output_ids": ["a"]}', LOGIN, b"[]"],
)
def test_an_answer_without_one_token_is_none(stub: Answering, answer: bytes) -> None:
    stub.answers["/generate"] = (200, answer)
    with pytest.raises(Unavailable, match="/generate"):
        token_of(stub)


@contextmanager
def dripping(head: bytes, drop: bytes, pause: float) -> Iterator[str]:
    """A listener that answers with a head, and then with one drop after the other for as long as anybody listens."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            with suppress(OSError):
                connection, _ = listener.accept()
                with connection:
                    connection.recv(1 << 16)
                    connection.sendall(head)
                    while True:
                        connection.sendall(drop)
                        time.sleep(pause)

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    thread.join(10)


HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nConnection: close\r\n\r\n"


def test_an_answer_that_drips_is_read_no_longer_than_asked() -> None:
    # Pieces of the answer come sooner than the time-out, which alone would therefore never come.
    late = pytest.raises(Unavailable, match=r"does not answer in 0\.2 s")
    with dripping(HEAD, b" ", 0.02) as url, Server(url, 0.2) as server, late:
        server.info()


def test_an_answer_without_an_end_takes_no_memory_without_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace_cli.doctor.server._MOST_BYTES", 1000)
    endless = pytest.raises(Unavailable, match="without an end")
    with dripping(HEAD, b" " * (1 << 16), 0.0) as url, Server(url, 60) as server, endless:
        server.info()


def test_an_answer_that_nests_deeper_than_python_is_no_object(stub: Answering) -> None:
    stub.answers["/server_info"] = (200, b"[" * 20_000)
    assert "no JSON object" in problem_of(stub)

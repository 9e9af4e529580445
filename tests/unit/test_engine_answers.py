"""What an engine's answer means for the attempt."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, get_args

import pytest

from headrace import metrics
from headrace.generate import Answer, Outcome, read_answer
from headrace_dispatcher.engines import EngineClient
from tests.support.dispatching import Engine, hanging_listener


def body(**meta: Any) -> bytes:
    return json.dumps({"text": "", "meta_info": {"id": "x", "prompt_tokens": 3, **meta}}).encode()


@pytest.mark.parametrize(
    ("status", "content", "outcome", "reason", "burns", "computing"),
    [
        (200, body(finish_reason={"type": "length"}), "answered", "", True, True),
        (200, body(finish_reason=None), "answered", "", True, True),
        (200, body(finish_reason={"type": "abort", "message": "gone"}), "refused", "aborted", True, True),
        (200, body(headrace="dropped:evicted"), "dropped", "evicted", True, True),
        (200, body(headrace="dropped:no_room"), "dropped", "no_room", False, True),
        (200, body(headrace=[None, "dropped:internal"]), "dropped", "internal", True, True),
        (200, body(headrace="dropped:prefix_cached"), "dropped", "prefix_cached", True, True),
        (200, body(headrace="dropped:disk on fire"), "dropped", "internal", True, True),
        (200, body(headrace="dropped:duplicate"), "dropped", "internal", True, True),
        (200, body(headrace=[]), "answered", "", True, True),
        (200, body(headrace={"a": 1}), "answered", "", True, True),
        (400, b'{"error": {"message": "duplicate rid"}}', "refused", "http_400", True, True),
        (401, b"sign in", "refused", "http_401", True, False),
        (404, b"no such page", "refused", "http_404", True, False),
        (429, b"slower", "refused", "http_429", True, False),
        (503, b"loading", "unavailable", "http_503", False, False),
        (500, b"", "unavailable", "http_500", False, False),
        (200, b"<html>", "refused", "bad_answer", True, False),
        (200, b"[]", "refused", "bad_answer", True, False),
        (200, b'{"meta_info": 3}', "refused", "bad_answer", True, False),
        (200, b'{"meta_info": {"finish_reason": "stop"}}', "answered", "", True, True),
    ],
)
def test_each_answer_has_its_meaning(
    status: int, content: bytes, outcome: str, reason: str, burns: bool, computing: bool
) -> None:
    answer = read_answer(status, content)
    assert (answer.outcome, answer.reason, answer.burns, answer.computing) == (outcome, reason, burns, computing)


@pytest.mark.parametrize(
    ("answer", "counted"),
    [
        (read_answer(500, b""), True),
        (read_answer(503, b""), True),
        (read_answer(429, b""), False),
        (read_answer(200, body()), False),
        (read_answer(200, body(headrace="dropped:no_room")), False),
        (Answer(outcome="unavailable", reason="connection"), False),
        (Answer(outcome="unavailable", reason="dispatcher_stopped"), False),
    ],
)
def test_of_what_costs_no_attempt_a_5xx_may_be_the_prompts_doing(answer: Answer, counted: bool) -> None:
    assert answer.counted == counted


def test_what_an_engine_said_is_the_detail_and_bounded() -> None:
    assert read_answer(200, body(headrace="dropped:disk on fire")).detail == "dropped:disk on fire"
    for content in (b"<html>" * 1000, body(finish_reason={"type": "abort", "message": "x" * 5000})):
        assert len(read_answer(200, content).detail) < 500


def test_every_outcome_is_a_label_of_the_metric() -> None:
    assert set(metrics.OUTCOMES) == set(get_args(Outcome))


def test_no_engine_costs_no_attempt() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    answer = EngineClient(5.0).generate(f"http://127.0.0.1:{port}", "hr-x", [1, 2])
    assert (answer.outcome, answer.reason, answer.burns) == ("unavailable", "connection", False)


@pytest.fixture
def engine() -> Iterator[tuple[str, list[tuple[str, Any]]]]:
    """A server that hangs on /generate until its test ends, and notes what it was asked."""
    asked: list[tuple[str, Any]] = []
    release = threading.Event()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            length = int(self.headers["Content-Length"])
            asked.append((self.path, json.loads(self.rfile.read(length))))
            if self.path == "/generate":
                release.wait(20)
            self.send_response(200)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_address[1]}", asked
    release.set()
    server.shutdown()
    server.server_close()
    thread.join()


def test_a_time_out_costs_an_attempt_and_aborts_the_request(engine: tuple[str, list[tuple[str, Any]]]) -> None:
    url, asked = engine
    answer: Answer = EngineClient(0.2).generate(url, "hr-x", [1, 2])
    assert (answer.outcome, answer.burns) == ("timeout", True)
    (path, sent), (second, abort) = asked
    assert path == "/generate"
    assert (sent["input_ids"], sent["rid"], sent["extra_key"]) == ([1, 2], "hr-x", "hr-x")
    assert (second, abort) == ("/abort_request", {"rid": "hr-x"})


@pytest.mark.parametrize(("status", "problem"), [(200, ""), (503, "a probe that brought http_503")])
def test_a_probe_says_what_the_engine_answered(status: int, problem: str) -> None:
    with Engine() as stub:
        stub.health = lambda: status
        assert EngineClient(5.0).probe(stub.url) == problem
        assert stub.probed == 1


def test_a_probe_of_an_engine_that_is_away_or_hangs_says_so_in_time() -> None:
    with hanging_listener() as url:
        assert EngineClient(0.2).probe(url) == "a probe without an answer in 0.2 s"
    assert EngineClient(0.2).probe(url) == "a probe that failed (ConnectionError)"

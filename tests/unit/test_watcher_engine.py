from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from headrace.ids import RequestId
from headrace_watcher.engine import Answer, EngineClient, Health, Limits, Posted, longest_prompt
from tests.support.server import free_port
from tests.support.waiting import wait_until
from tests.support.watched import StubEngine

IDS = (5, 6, 7)
REQUEST = RequestId.make("canary", 0, "nonce000", IDS)


def ask(url: str, question: Callable[[EngineClient], None], answers: int = 1) -> list[Answer]:
    wake = threading.Event()
    found: list[Answer] = []
    with EngineClient(url, wake) as client:
        question(client)
        wait_until(lambda: found.extend(client.answers()) or len(found) >= answers, what="the engine's answers")
    assert wake.is_set()
    return found


def test_health_is_a_200_and_nothing_else(tmp_path: Path) -> None:
    with StubEngine(tmp_path) as engine:
        assert ask(engine.url, EngineClient.check_health) == [Health(problem="")]
        engine.health = 503
        (answer,) = ask(engine.url, EngineClient.check_health)
        assert answer == Health(problem=f"{engine.url}/health says 503")


def test_an_engine_that_is_not_there_is_a_problem_and_no_error() -> None:
    (answer,) = ask(f"http://127.0.0.1:{free_port()}", EngineClient.check_health)
    assert isinstance(answer, Health)
    assert "no answer" in answer.problem


@pytest.mark.parametrize("url", ["not a url", "http://", "ftp://127.0.0.1"])
def test_a_url_that_is_none_is_a_problem_and_no_error(url: str) -> None:
    limits, posted = ask(url, lambda client: client.post_canary(REQUEST, IDS, 5.0), answers=2)
    assert limits == Limits(longest_prompt=None)
    assert isinstance(posted, Posted)
    assert posted.problem


def test_a_canary_is_posted_after_the_limit_is_known(tmp_path: Path) -> None:
    got: list[Any] = []
    with StubEngine(tmp_path) as engine:
        engine.on_canary = lambda request, ids: got.append((request, tuple(ids)))
        answers = ask(f"{engine.url}/", lambda client: client.post_canary(REQUEST, IDS, 5.0), answers=2)
    assert answers == [Limits(longest_prompt=1000), Posted(request=REQUEST, problem="")]
    assert got == [(REQUEST, IDS)]


def test_a_canary_that_is_refused_says_so(tmp_path: Path) -> None:
    with StubEngine(tmp_path) as engine:
        engine.status = 400
        answers = ask(engine.url, lambda client: client.post_canary(REQUEST, IDS, 5.0), answers=2)
    assert isinstance(answers[1], Posted)
    assert "400" in answers[1].problem


@pytest.mark.parametrize(
    ("meta", "words"),
    [
        ('{"finish_reason": {"type": "abort", "message": "gone"}}', ("aborted", "gone")),
        ('{"headrace": "dropped:prefix_cached"}', ("prefix_cached", "--disable-radix-cache")),
        ('{"headrace": ["dropped:the plugin is upset"]}', ("internal", "the plugin is upset")),
    ],
)
def test_a_canary_that_was_aborted_or_dropped_fails_with_its_answer(
    tmp_path: Path, meta: str, words: tuple[str, ...]
) -> None:
    with StubEngine(tmp_path) as engine:
        engine.reply = f'{{"text": "", "meta_info": {meta}}}'.encode()
        _, posted = ask(engine.url, lambda client: client.post_canary(REQUEST, IDS, 5.0), answers=2)
    assert isinstance(posted, Posted)
    assert all(word in posted.problem for word in words), posted


def test_one_health_check_is_under_way_at_a_time(tmp_path: Path) -> None:
    with StubEngine(tmp_path) as engine:
        go = threading.Event()
        engine.on_canary = lambda request, ids: go.wait(20)
        wake = threading.Event()
        with EngineClient(engine.url, wake) as client:
            client.post_canary(REQUEST, IDS, 20.0)
            for _ in range(50):
                client.check_health()
            go.set()
            found: list[Answer] = []
            wait_until(lambda: found.extend(client.answers()) or Health(problem="") in found, what="the health")
        assert found.count(Health(problem="")) == 1


def test_a_question_that_raises_does_not_end_the_thread_that_asks(tmp_path: Path) -> None:
    def question(client: EngineClient) -> None:
        client.post_canary(REQUEST, (object(),), 5.0)  # type: ignore[arg-type]
        client.check_health()

    with StubEngine(tmp_path) as engine:
        answers = ask(engine.url, question, answers=2)
    assert answers == [Limits(longest_prompt=1000), Health(problem="")]


@pytest.mark.parametrize(
    ("table", "longest"),
    [
        ({"max_req_input_len": 100, "context_length": 4096}, 100),
        ({"context_length": 4096}, 4090),
        ({"max_req_input_len": None, "context_length": 4096}, 4090),
        ({"max_req_input_len": None, "context_length": None}, None),
        ({"max_req_input_len": "100"}, None),
        ({"context_length": 3}, None),
        ({"max_req_input_len": True}, None),
        ({}, None),
        ([], None),
        (None, None),
    ],
)
def test_the_longest_prompt_is_read_from_what_the_engine_says(table: Any, longest: int | None) -> None:
    assert longest_prompt(table) == longest

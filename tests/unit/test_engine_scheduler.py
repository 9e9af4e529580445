"""The engine's scheduler over a real tiny model: steps as the capture sees them, failures, and the end."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future

import pytest

from headrace.errors import HeadraceError, Unavailable
from headrace_engine.model import TargetModel
from headrace_engine.scheduler import DuplicateRequest, Scheduler
from headrace_engine.steps import Chunk, Request
from tests.support.engine import random_ids
from tests.support.tiny_models import tiny_llama


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> TargetModel:
    folder = tiny_llama(tmp_path_factory.mktemp("model"))
    return TargetModel(folder, boundaries="eagle3", final_state="pre_norm", dtype="float32")


@pytest.fixture
def failures() -> list[Exception]:
    return []


@pytest.fixture
def scheduler(model: TargetModel, failures: list[Exception]) -> Iterator[Scheduler]:
    made = Scheduler(
        model, None, chunk_tokens=16, max_running=4, max_queued=3, weight_version="w1", on_failure=failures.append
    )
    yield made
    made.drain(0.0)
    assert made.join(20)


def test_a_step_is_one_forward_with_all_rows_in_order(model: TargetModel, scheduler: Scheduler) -> None:
    prompts = [random_ids(5, seed=1), random_ids(9, seed=2)]
    requests = [
        Request(
            rid=f"r{number}",
            prompt=tuple(prompt),
            max_new_tokens=1,
            stop_tokens=frozenset(),
            cache=model.new_cache(),
            answer=Future(),
        )
        for number, prompt in enumerate(prompts)
    ]
    first = scheduler.run_step([Chunk(request=requests[0], rows=5), Chunk(request=requests[1], rows=4)])
    assert [(piece.rid, piece.prompt_tokens, piece.prefix, piece.rows) for piece in first.pieces] == [
        ("r0", 5, 0, 5),
        ("r1", 9, 0, 4),
    ]
    assert first.token_ids.tolist() == prompts[0] + prompts[1][:4]
    assert [tuple(states.shape) for states in (*first.boundaries, first.final)] == [(9, 64)] * 4
    assert first.weight_version == "w1"
    second = scheduler.run_step([Chunk(request=requests[1], rows=5), Chunk(request=requests[0], rows=1)])
    assert [(piece.rid, piece.prefix, piece.rows) for piece in second.pieces] == [("r1", 4, 5), ("r0", 5, 1)]
    assert second.token_ids.tolist() == prompts[1][4:] + requests[0].output[:1]
    scheduler.start()  # only now: one thread at a time owns the model


def test_a_step_that_fails_ends_the_engine_and_every_client_is_told(
    scheduler: Scheduler, failures: list[Exception]
) -> None:
    bad = scheduler.submit("bad", [100_000], 0)  # the engine checks ids before: this one breaks the model
    good = scheduler.submit("good", [5, 6], 0)
    scheduler.start()
    for answer in (bad, good):
        with pytest.raises(Unavailable, match="a step failed"):
            answer.result(20)
    assert scheduler.join(20)
    assert len(failures) == 1
    with pytest.raises(Unavailable):
        scheduler.submit("late", [5], 0)


def test_the_queue_is_bounded_and_an_id_is_taken_once(scheduler: Scheduler, failures: list[Exception]) -> None:
    answers = [scheduler.submit(rid, [5, 6], 0) for rid in ("a", "ab", "b")]
    with pytest.raises(DuplicateRequest):
        scheduler.submit("a", [5], 0)
    with pytest.raises(Unavailable, match="queue is full"):
        scheduler.submit("c", [5], 0)
    scheduler.withdraw("a")
    scheduler.start()
    assert [answer.result(20).finish_reason["type"] for answer in answers] == ["abort", "length", "length"]
    assert not failures


def test_an_abort_matches_by_prefix_as_sglang_does(scheduler: Scheduler) -> None:
    answers = [scheduler.submit(rid, [5, 6], 0) for rid in ("a", "ab", "b")]
    scheduler.abort("a")
    scheduler.start()
    assert [answer.result(20).finish_reason["type"] for answer in answers] == ["abort", "abort", "length"]


def test_draining_ends_what_takes_too_long_and_refuses_the_rest(scheduler: Scheduler) -> None:
    scheduler.start()
    answer = scheduler.submit("long", [5, 6], 100_000, ignore_eos=True)
    scheduler.drain(0.2)
    with pytest.raises(HeadraceError, match="stops"):
        scheduler.submit("late", [5], 0)
    assert answer.result(20).finish_reason["type"] == "abort"
    assert scheduler.join(20)

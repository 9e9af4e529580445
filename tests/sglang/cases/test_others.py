"""Other people's traffic on the same server: nothing of it in the folder, nothing of it changed, and ours right."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import requests

from tests.sglang.cases.asking import Client, Prompt, Prompts, meta
from tests.sglang.cases.rig import CHUNK, MAIN, VOCAB, Rig

pytestmark = pytest.mark.served(MAIN)


def _logprobs(client: Client, ids: tuple[int, ...]) -> requests.Response:
    return client.generate(ids, None, 3, return_logprob=True, logprob_start_len=0, top_logprobs_num=2)


def _some_logprobs(client: Client, ids: tuple[int, ...]) -> requests.Response:
    return client.generate(ids, None, 3, return_logprob=True, logprob_start_len=len(ids) // 2)


def _scores(client: Client, ids: tuple[int, ...]) -> requests.Response:
    body = {"query": list(ids[:20]), "items": [list(ids[20:30]), list(ids[30:40])], "label_token_ids": [5, 6]}
    return client.post("/v1/score", body | {"model": "default"})


def _chat(client: Client, ids: tuple[int, ...]) -> requests.Response:
    messages = [{"role": "user", "content": f"How many of {ids[:3]} are there?"}]
    return client.post("/v1/chat/completions", {"model": "default", "messages": messages, "max_tokens": 4})


def _health(client: Client, _ids: tuple[int, ...]) -> requests.Response:
    return client.get("/health_generate")


KINDS: dict[str, Callable[[Client, tuple[int, ...]], requests.Response]] = {
    "plain": lambda client, ids: client.generate(ids, None, 8),
    "prefill": lambda client, ids: client.generate(ids, None, 0),
    "streamed": lambda client, ids: client.generate(ids, None, 8, stream=True),
    "several": lambda client, ids: client.generate(ids, None, sampling_params={"max_new_tokens": 4, "n": 2}),
    "list": lambda client, ids: client.generate([ids, ids[:9]], ["a", "b"], 3),
    "states": lambda client, ids: client.generate(ids, None, 2, return_hidden_states=True),
    "logprobs": _logprobs,
    "some logprobs": _some_logprobs,
    "scores": _scores,
    "chat": _chat,
    "health": _health,
}


def send(client: Client, kind: str, times: int) -> None:
    """Send prompts in one way, one after another."""
    prompts = Prompts(VOCAB, f"others {kind}")
    for _ in range(times):
        answer = KINDS[kind](client, prompts.ids(2 * CHUNK))
        assert answer.status_code == 200, f"{kind}: {answer.text[:300]}"


def test_all_kinds_of_traffic_at_once(rig: Rig) -> None:
    others = [rig.client.begin(send, rig.client, kind, 4) for kind in KINDS]
    prompts: list[Prompt] = []
    while not (all(other.done() for other in others) and prompts):
        wave = rig.prompts.some(8, 1, 4 * CHUNK)
        rig.take_all(wave, [rig.client.begin_capture(prompt, len(prompt.ids) % 3) for prompt in wave])
        prompts += wave
    for other in others:
        other.result()
    assert strangers_beside(rig, prompts)


@pytest.mark.parametrize("kind", sorted(set(KINDS) - {"health", "chat", "scores"}))
def test_one_kind_in_the_same_forward(rig: Rig, kind: str) -> None:
    """The scheduler is slow, so what comes while it computes the first one is taken together."""
    prompts: list[Prompt] = []
    with rig.client.slowed(0.1):
        while not strangers_beside(rig, prompts):
            wave = rig.prompts.some(4, 3, 9)
            answers = [rig.client.begin_capture(wave[0])]
            other = rig.client.begin(KINDS[kind], rig.client, rig.prompts.ids(20))
            answers += [rig.client.begin_capture(prompt) for prompt in wave[1:]]
            rig.take_all(wave, answers)
            assert other.result().status_code == 200
            prompts += wave
            assert len(prompts) < 80


def strangers_beside(rig: Rig, prompts: list[Prompt]) -> bool:
    """Whether somebody else's rows were in a forward with rows of these."""
    ours = {prompt.rid for prompt in prompts}
    return any(rid in ours and not ours.issuperset(piece.others) for rid, piece in rig.all_pieces())


@pytest.mark.parametrize(
    "wishes",
    [
        {"return_logprob": True, "logprob_start_len": 0},
        {"return_logprob": True, "logprob_start_len": 2 * CHUNK},
        {"return_hidden_states": True},
    ],
    ids=str,
)
@pytest.mark.parametrize("new_tokens", [0, 3])
def test_what_our_own_requests_may_ask_for(rig: Rig, wishes: dict[str, Any], new_tokens: int) -> None:
    prompt = rig.prompts.new(3 * CHUNK + 7)
    assert rig.client.capture(prompt, new_tokens, **wishes).status_code == 200
    rig.take(prompt)


def test_an_embedding_is_refused(rig: Rig) -> None:
    prompt = rig.prompts.new(CHUNK)
    answer = rig.client.post("/encode", {"input_ids": prompt.ids, "rid": prompt.rid})
    assert answer.status_code == 400
    assert rig.pieces(prompt.rid) == []


def test_the_answers_of_others_are_the_same_beside_ours(rig: Rig) -> None:
    theirs = [rig.prompts.ids(CHUNK // 2) for _ in range(6)]

    def ask() -> list[list[int]]:
        rig.client.post("/flush_cache")
        answers = [rig.client.begin_generate(ids, None, 12) for ids in theirs]
        return [answer.result().json()["output_ids"] for answer in answers]

    alone = ask()
    prompts = rig.prompts.some(12, CHUNK, 3 * CHUNK)
    running = [rig.client.begin_capture(prompt) for prompt in prompts]
    assert ask() == alone
    rig.take_all(prompts, running)


def test_health_checks_leave_nothing(rig: Rig) -> None:
    assert rig.client.get("/health_generate").status_code == 200
    assert meta(rig.client.generate(rig.prompts.ids(9), "HEALTH_CHECK_0", 1))["id"] == "HEALTH_CHECK_0"
    assert rig.pieces("HEALTH_CHECK_0")[0].prefix == 0

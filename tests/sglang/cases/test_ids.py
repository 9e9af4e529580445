"""Request ids that come twice, that say another prompt than was sent, and that are none of ours."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tokenizers import Tokenizer

from headrace.dumpfolder import read_dump
from headrace.ids import encode_ids
from headrace.reasons import Reason
from tests.sglang.cases.asking import Prompt, meta
from tests.sglang.cases.rig import CHUNK, CONTEXT, MAIN, Rig

pytestmark = pytest.mark.served(MAIN)
DUPLICATE = "Duplicate request ID"


def test_an_id_that_is_in_flight_is_refused_and_the_first_one_unharmed(rig: Rig) -> None:
    prompt = rig.prompts.new(6 * CHUNK)
    with rig.client.slowed():
        first = rig.client.begin_capture(prompt)
        rig.folder.wait_half(prompt.rid)
        second = rig.client.generate(rig.prompts.ids(len(prompt.ids)), prompt.rid)
        assert (second.status_code, DUPLICATE in second.text) == (400, True)
    rig.take_all([prompt], [first])


def test_an_id_twice_in_one_list_is_refused(rig: Rig) -> None:
    prompt = rig.prompts.new(9)
    answer = rig.client.generate([prompt.ids, prompt.ids], [prompt.rid, prompt.rid])
    assert (answer.status_code, DUPLICATE in answer.text) == (400, True)
    assert rig.pieces(prompt.rid) == []


def test_the_same_id_again_is_published_once(rig: Rig) -> None:
    prompt = rig.prompts.new(2 * CHUNK + 1)
    assert rig.client.capture(prompt).status_code == 200
    path = rig.folder.dump_path(prompt.rid)
    rig.folder.wait_published(prompt.rid)
    before = path.stat()
    assert rig.client.capture(prompt, extra_key="another").status_code == 200
    rig.capture(rig.prompts.new(5))
    assert (path.stat().st_ino, path.stat().st_mtime_ns) == (before.st_ino, before.st_mtime_ns)
    rig.take(prompt)
    assert rig.client.capture(prompt, extra_key="a third").status_code == 200
    assert [piece.prefix for piece in rig.pieces(prompt.rid)] == 3 * [0, CHUNK, 2 * CHUNK]


@pytest.mark.parametrize("said", [1, CHUNK, 3 * CHUNK, 500])
def test_an_id_that_says_another_length_is_a_loss(rig: Rig, said: int) -> None:
    sent = rig.prompts.ids(2 * CHUNK + 5)
    prompt = replace(rig.prompts.new(said), ids=sent)
    assert f"dropped:{Reason.INCOMPLETE}" in meta(rig.client.capture(prompt, 1))["headrace"]
    lost = rig.take_lost(prompt)
    assert lost.reason == Reason.INCOMPLETE
    assert f"{said} tokens" in lost.detail


def test_an_id_that_says_other_tokens_is_proven_wrong_by_its_dump(rig: Rig) -> None:
    prompt, sent = rig.prompts.new(CHUNK + 9), rig.prompts.ids(CHUNK + 9)
    assert rig.client.capture(replace(prompt, ids=sent)).status_code == 200
    path = rig.folder.wait_published(prompt.rid)
    assert read_dump(path).token_ids == encode_ids(sent)
    assert rig.folder.wrong(path).startswith(Reason.TOKEN_CONTENT)
    path.unlink()


def test_ids_that_are_not_ours_leave_nothing(rig: Rig) -> None:
    prompt = rig.prompts.new(CHUNK + 2)
    rid = prompt.rid
    others = [rid.upper(), f"{rid}0", f"{rid}_0", f"x{rid}", rid[:-1], f"../{rid}", f"{rid}\n", f"{rid}.safetensors"]
    for other in [*others, "hr-", "hr-a/b", "engine.json"]:
        assert rig.client.generate(prompt.ids, other, extra_key=other).status_code == 200, other
        assert len(rig.pieces(other)) == 2
    assert rig.client.capture(prompt, 2, sampling_params={"max_new_tokens": 2, "n": 2}).status_code == 200
    assert rig.client.generate([prompt.ids, prompt.ids], prompt.rid).status_code == 200
    assert rig.pieces(rid) == []


def test_a_text_is_what_the_servers_tokenizer_makes_of_it(rig: Rig) -> None:
    text = "How many rows does a chunk of a long prompt have?"
    tokenizer = Tokenizer.from_file(str(rig.server.model / "tokenizer.json"))
    ids = tokenizer.encode(text).ids
    prompt, longer = rig.prompts.of(ids), rig.prompts.of([1, *ids])
    for asked in (prompt, longer):
        body = {"text": text, "rid": asked.rid, "extra_key": asked.rid, "sampling_params": {"max_new_tokens": 0}}
        assert rig.client.post("/generate", body).status_code == 200
    rig.take(prompt)
    assert rig.take_lost(longer).reason == Reason.INCOMPLETE


def test_a_prompt_longer_than_the_context_is_refused_and_never_run(rig: Rig) -> None:
    prompt = rig.prompts.new(CONTEXT + 100)
    assert rig.client.capture(prompt).status_code == 400
    assert rig.pieces(prompt.rid) == []


@pytest.mark.parametrize("said", [CONTEXT - 3, 1])
def test_the_stub_of_a_refused_prompt_is_no_dump(rig: Rig, said: int) -> None:
    """Between the HTTP server's limit and the scheduler's, one token 0 is computed under the request's id."""
    sent = rig.prompts.ids(CONTEXT - 3)
    prompt = Prompt(rid=rig.prompts.of(sent[:said]).rid, ids=sent)
    assert rig.client.capture(prompt).status_code == 400
    assert [(piece.prefix, piece.rows) for piece in rig.pieces(prompt.rid)] == [(0, 1)]
    assert rig.take_lost(prompt).reason == Reason.INCOMPLETE

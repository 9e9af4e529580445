from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import safe_open

from headrace.dumpfolder import read_card, read_dump, read_norm
from headrace.ids import RequestId
from headrace.verdicts import Reason, Refusal, Requirement, judge
from headrace_capture.core import Capture
from headrace_capture.forward import Forward
from tests.support.capture import (
    BOUNDARIES,
    HIDDEN,
    Prompt,
    assert_published,
    dump_path,
    forward_of,
    leftovers,
    lost,
    prompt,
    start_capture,
)


def feed(capture: Capture, *forwards: Forward) -> None:
    for forward in forwards:
        assert capture.forward(forward) == {}
    assert capture.flush(30)


def verdict(folder: Path, wanted: Prompt) -> object:
    requirement = Requirement(boundaries=BOUNDARIES, final_state="pre_norm", hidden_size=HIDDEN, identity=None)
    return judge(read_dump(dump_path(folder, wanted)), wanted.request, requirement)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_a_whole_prompt_becomes_a_dump(folder: Path, dtype: torch.dtype) -> None:
    capture = start_capture(folder, dtype=dtype)
    one = prompt(37, dtype=dtype)
    feed(capture, forward_of([(one, 0, 37)]))
    header = assert_published(folder, one)
    assert (header.parts, header.retractions, header.weight_version) == (1, 0, "weights-1")
    assert header.engine == "engine 1.0 tiny bf16 tp1" and header.model == "tiny"
    capture.close(10)
    assert leftovers(folder) == []


def test_several_requests_of_one_forward_become_a_dump_each_beside_rows_of_others(
    capture: Capture, folder: Path
) -> None:
    ours = [prompt(tokens, ordinal=tokens) for tokens in (1, 20, 7)]
    other = prompt(11, rid="0b3f-health")
    rows = [(ours[0], 0, 1), (other, 0, 11), (ours[1], 0, 20), (ours[2], 0, 7)]
    feed(capture, forward_of(rows, decode=[prompt(5, ordinal=77), other], padding=9))
    for one in ours:
        assert_published(folder, one)
    assert sorted(p.name for p in folder.glob("hr-*")) == sorted(dump_path(folder, one).name for one in ours)
    counts = capture.counts()
    assert (counts.published, counts.lost, counts.ignored, counts.half_assembled) == (3, {}, 3, 0)
    assert counts.published_bytes >= sum(dump_path(folder, one).stat().st_size for one in ours)
    assert counts.buffer_bytes == 0


def test_ids_of_others_leave_nothing(capture: Capture, folder: Path) -> None:
    before = sorted(folder.iterdir())
    for rid in ("HEALTH_CHECK_1", "../../etc/x", f"{prompt(5).rid}_0", ""):
        feed(capture, forward_of([(prompt(5, rid=rid or "x"), 0, 5)]))
    assert sorted(folder.iterdir()) == before


def test_the_canary_is_captured_like_any(capture: Capture, folder: Path) -> None:
    canary = prompt(9, run="canary")
    assert canary.request.is_canary
    feed(capture, forward_of([(canary, 0, 9)]))
    assert_published(folder, canary)


def test_chunks_are_put_together(capture: Capture, folder: Path) -> None:
    one, two = prompt(1300, ordinal=1), prompt(40, ordinal=2)
    feed(
        capture,
        forward_of([(one, 0, 512)]),
        forward_of([(one, 512, 1024)]),
        forward_of([(one, 1024, 1300), (two, 0, 40)]),
    )
    assert assert_published(folder, one).parts == 3
    assert_published(folder, two)


def test_a_request_in_the_middle_has_a_hidden_file_and_no_dump(capture: Capture, folder: Path) -> None:
    one = prompt(100)
    feed(capture, forward_of([(one, 0, 60)]))
    assert leftovers(folder) == [f".{capture.boot}.{one.rid}.part"]
    assert not dump_path(folder, one).exists()
    assert capture.counts().half_assembled == 1


def test_a_retraction_in_the_middle_of_chunked_prefill_leaves_all_rows(capture: Capture, folder: Path) -> None:
    one = prompt(1300)
    feed(capture, *(forward_of([(one, at, min(at + 512, 1300))]) for at in (0, 512, 512, 1024)))
    header = assert_published(folder, one)
    assert (header.parts, header.retractions) == (4, 1)


def test_a_repeated_row_overwrites(capture: Capture, folder: Path) -> None:
    one = prompt(30)
    stale = Prompt(
        rid=one.rid, token_ids=one.token_ids, boundaries=tuple(b + 1 for b in one.boundaries), final=one.final + 1
    )
    feed(capture, forward_of([(stale, 0, 20)]), forward_of([(one, 0, 25)]), forward_of([(one, 25, 30)]))
    assert_published(folder, one)


def test_parts_may_come_in_any_order_but_the_last(capture: Capture, folder: Path) -> None:
    one = prompt(90)
    feed(capture, *(forward_of([(one, at, at + 30)]) for at in (30, 0, 60)))
    assert assert_published(folder, one).retractions == 0


def test_a_prompt_larger_than_the_whole_buffer_is_captured(folder: Path) -> None:
    capture = start_capture(folder, buffer_bytes=4096, max_wait_seconds=10)
    one = prompt(700)
    feed(capture, forward_of([(one, 0, 700)]))
    assert_published(folder, one)
    capture.close(10)


def test_the_engine_may_overwrite_its_tensors_when_forward_returns(capture: Capture, folder: Path) -> None:
    prompts = [prompt(200, ordinal=ordinal) for ordinal in range(8)]
    for one in prompts:
        forward = forward_of([(one, 0, 200)])
        assert capture.forward(forward) == {}
        for tensor in (forward.token_ids, *forward.boundaries, forward.final):
            tensor.zero_()
    assert capture.flush(30)
    for one in prompts:
        assert_published(folder, one)


def test_tensors_of_inference_mode_and_int32_ids_and_views_are_taken(capture: Capture, folder: Path) -> None:
    one = prompt(50)
    with torch.inference_mode():
        plain = forward_of([(one, 0, 50)])
        wide = torch.cat(plain.boundaries, dim=1) + 0
        forward = Forward(
            pieces=plain.pieces,
            token_ids=plain.token_ids.to(torch.int32),
            boundaries=tuple(wide[:, k * HIDDEN : (k + 1) * HIDDEN] for k in range(len(BOUNDARIES))),
            final=plain.final,
            weight_version=plain.weight_version,
        )
        feed(capture, forward)
    assert_published(folder, one)


@pytest.mark.parametrize("buffer_bytes", [1 << 13, 1 << 20])
def test_boundaries_that_lie_side_by_side_in_one_tensor_are_taken(folder: Path, buffer_bytes: int) -> None:
    capture = start_capture(folder, buffer_bytes=buffer_bytes)
    one, two = prompt(90, ordinal=1), prompt(31, ordinal=2)
    for rows in ([(one, 0, 50)], [(one, 50, 90), (two, 0, 31)]):
        plain = forward_of(rows, padding=3)
        feed(capture, replace(plain, boundaries=(torch.cat(plain.boundaries, dim=1),)))
    assert assert_published(folder, one).parts == 2
    assert_published(folder, two)
    capture.close(10)


def test_a_published_id_is_not_captured_again(capture: Capture, folder: Path) -> None:
    one = prompt(30)
    feed(capture, forward_of([(one, 0, 30)]))
    inode = dump_path(folder, one).stat().st_ino
    feed(capture, forward_of([(one, 0, 30)]))
    assert dump_path(folder, one).stat().st_ino == inode
    assert (capture.counts().published, capture.counts().ignored) == (1, 1)


def test_a_dump_that_lies_there_is_never_replaced(folder: Path) -> None:
    one, two = prompt(30), prompt(30, ordinal=2)
    first = start_capture(folder)
    feed(first, forward_of([(one, 0, 30)]))
    first.close(10)
    before = dump_path(folder, one).read_bytes()
    second = start_capture(folder)  # another boot remembers nothing
    changed = Prompt(rid=one.rid, token_ids=one.token_ids, boundaries=two.boundaries, final=two.final)
    feed(second, forward_of([(changed, 0, 30)]))
    assert dump_path(folder, one).read_bytes() == before
    assert second.counts().published == 0 and second.counts().lost == {}
    second.close(10)
    assert leftovers(folder) == []


def test_nan_and_zero_rows_are_seen_by_the_verdict(capture: Capture, folder: Path) -> None:
    nan, zero = prompt(40, ordinal=1), prompt(40, ordinal=2)
    nan.boundaries[1][33, 5] = float("nan")
    zero.final[39] = 0
    feed(capture, forward_of([(nan, 0, 30)]), forward_of([(nan, 30, 40), (zero, 0, 40)]))
    bad, degenerate = verdict(folder, nan), verdict(folder, zero)
    assert isinstance(bad, Refusal) and bad.reason is Reason.NOT_FINITE and "1 values at 4 " in bad.detail
    assert isinstance(degenerate, Refusal) and degenerate.reason is Reason.DEGENERATE and "final" in degenerate.detail


def test_the_token_ids_are_those_that_the_model_computed(capture: Capture, folder: Path) -> None:
    one = prompt(12)
    computed = Prompt(rid=one.rid, token_ids=one.token_ids + 1, boundaries=one.boundaries, final=one.final)
    feed(capture, forward_of([(computed, 0, 12)]))
    refusal = verdict(folder, one)
    assert isinstance(refusal, Refusal) and refusal.reason is Reason.TOKEN_CONTENT


def test_the_engine_declares_itself_and_its_final_norm(folder: Path) -> None:
    weight = torch.randn(HIDDEN).to(torch.bfloat16)
    capture = start_capture(folder, norm_weight=weight)
    card = read_card(folder / "engine.json")
    assert (card.boot, card.boundaries, card.final_state, card.dtype) == (capture.boot, BOUNDARIES, "pre_norm", "BF16")
    assert (card.layers, card.hidden_size, card.weight_version) == (8, HIDDEN, "weights-1")
    with safe_open(folder / card.norm_file, framework="pt") as tensors:
        assert torch.equal(tensors.get_tensor("weight"), weight)
        assert float(tensors.metadata()["eps"]) == 1e-5
    assert read_norm(folder / card.norm_file).eps == 1e-5  # by its checksum
    assert card.norm_file == f"final_norm.{capture.boot}.safetensors"
    assert all((folder / name).stat().st_mode & 0o7777 == 0o640 for name in ("engine.json", card.norm_file))
    one = prompt(12)
    feed(capture, forward_of([(one, 0, 12)]))
    declared = f"engine 1.0 tiny bf16 tp1 norm-{read_norm(folder / card.norm_file).digest}"
    assert card.fingerprint == read_dump(dump_path(folder, one)).header.engine == declared
    capture.close(10)


def test_without_a_norm_the_card_names_none(capture: Capture, folder: Path) -> None:
    card = read_card(folder / "engine.json")
    assert (card.norm_file, card.fingerprint) == ("", "engine 1.0 tiny bf16 tp1")


def test_an_id_as_long_as_they_get_fits_the_header(folder: Path) -> None:
    capture = start_capture(folder)
    one = prompt(3)
    rid = RequestId(
        run="r" * 24, ordinal=999_999_999_999, nonce="z" * 8, tokens=3, digest=RequestId.parse(one.rid).digest
    )
    long = Prompt(rid=str(rid), token_ids=one.token_ids, boundaries=one.boundaries, final=one.final)
    feed(capture, forward_of([(long, 0, 3)], weight_version='"\\' * 3000))
    assert_published(folder, long)
    capture.close(10)


def test_close_ends_the_threads_writes_what_is_queued_and_gives_up_the_rest(folder: Path) -> None:
    capture = start_capture(folder)
    whole, half = prompt(300, ordinal=1), prompt(300, ordinal=2)
    capture.forward(forward_of([(whole, 0, 300), (half, 0, 200)]))
    capture.close(30)
    assert_published(folder, whole)
    assert lost(folder, half).reason == "aborted"
    assert not [p for p in folder.iterdir() if p.name.startswith(".")]
    assert capture.forward(forward_of([(half, 200, 300)])) == {}
    capture.close(1)


@st.composite
def schedules(draw: st.DrawFn) -> list[list[tuple[int, int, int]]]:
    """Forwards of (prompt, begin, end): one half-prefilled prompt at a time, retracted at will, whole ones between."""
    sizes = draw(st.lists(st.integers(1, 60), min_size=1, max_size=6))
    forwards: list[list[tuple[int, int, int]]] = []
    for number, size in enumerate(sizes):
        at = 0
        while at < size:
            end = draw(st.integers(at + 1, size))
            forwards.append([(number, at, end)])
            at = end if end == size else draw(st.integers(0, end))
            if draw(st.integers(0, 3)) == 0 and at < size:
                at = draw(st.integers(0, at))
    merged: list[list[tuple[int, int, int]]] = []
    for forward in forwards:  # a prompt's last chunk may share its forward with the next prompt's first
        if merged and draw(st.booleans()) and merged[-1][-1][0] != forward[0][0]:
            merged[-1].extend(forward)
        else:
            merged.append(list(forward))
    return merged


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(schedules(), st.integers(1, 3), st.sampled_from([2048, 1 << 16]), st.integers(0, 2))
def test_a_published_dump_is_the_source_rows_however_they_were_split_and_repeated(
    tmp_path: Path, forwards: list[list[tuple[int, int, int]]], writers: int, buffer_bytes: int, padding: int
) -> None:
    folder = tmp_path / os.urandom(6).hex()
    capture = start_capture(folder, writers=writers, buffer_bytes=buffer_bytes)
    sizes: dict[int, int] = {}
    for number, _, end in (part for forward in forwards for part in forward):
        sizes[number] = max(end, sizes.get(number, 0))
    prompts = {number: prompt(size, ordinal=number) for number, size in sizes.items()}
    feed(capture, *(forward_of([(prompts[n], b, e) for n, b, e in f], padding=padding) for f in forwards))
    for one in prompts.values():
        assert_published(folder, one)
    assert capture.counts().published == len(prompts) and capture.counts().buffer_bytes == 0
    assert leftovers(folder) == []
    capture.close(10)

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from headrace.dumps import Dump, DumpHeader, Stats, dump_layout
from headrace.ids import RequestId, encode_ids
from headrace.runs import Identity
from headrace.verdicts import LOSSES, LOST_REASONS, MISMATCHES, Match, Reason, Refusal, Requirement, judge
from tests.support.bus_values import make_spec

IDS = [11, 12, 13, 14, 15]
REQUEST = RequestId.make("run1", 7, "abcd1234", IDS)
BOUNDARIES, HIDDEN = (2, 4, 6), 8
IDENTITY = Identity(engine="engine 1", weight_version="w1")
REQUIREMENT = Requirement(boundaries=BOUNDARIES, final_state="pre_norm", hidden_size=HIDDEN, identity=IDENTITY)
STATS = tuple(Stats(layer=layer, not_finite=0, norm_min=0.5, norm_max=9.0) for layer in ("2", "4", "6", "final"))
HEADER = DumpHeader(
    request=str(REQUEST),
    tokens=5,
    boundaries=BOUNDARIES,
    final_state="pre_norm",
    parts=1,
    retractions=0,
    weight_version="w1",
    model="m",
    engine="engine 1",
    stats=STATS,
    checksum="xxh3:0123456789abcdef",
    tensors=dump_layout(5, 3, HIDDEN, "BF16"),
)
DUMP = Dump(header=HEADER, token_ids=encode_ids(IDS), data_offset=1024, file_size=2048)


def changed(**changes: Any) -> Dump:
    return replace(DUMP, header=replace(HEADER, **changes))


def with_tensor(name: str, **changes: Any) -> Dump:
    return changed(tensors={**HEADER.tensors, name: replace(HEADER.tensors[name], **changes)})


def with_stats(index: int, **changes: Any) -> Dump:
    stats = list(STATS)
    stats[index] = replace(stats[index], **changes)
    return changed(stats=tuple(stats))


def reason_of(dump: Dump, request: RequestId = REQUEST, requirement: Requirement = REQUIREMENT) -> Reason | None:
    verdict = judge(dump, request, requirement)
    if isinstance(verdict, Refusal):
        assert verdict.detail
        return verdict.reason
    return None


def test_a_dump_that_is_right_matches_and_says_who_made_it() -> None:
    assert judge(DUMP, REQUEST, REQUIREMENT) == Match(identity=IDENTITY)


def test_the_first_row_of_a_run_may_come_from_any_engine() -> None:
    first = replace(REQUIREMENT, identity=None)
    assert judge(changed(engine="e9", weight_version="w9"), REQUEST, first) == Match(
        identity=Identity(engine="e9", weight_version="w9")
    )


@pytest.mark.parametrize(
    ("dump", "reason"),
    [
        (replace(DUMP, token_ids=encode_ids([11, 12, 13, 14, 16])), Reason.TOKEN_CONTENT),
        (replace(DUMP, token_ids=encode_ids([12, 11, 13, 14, 15])), Reason.TOKEN_CONTENT),
        (replace(DUMP, token_ids=encode_ids(IDS[:4])), Reason.TOKEN_CONTENT),
        (replace(DUMP, token_ids=b""), Reason.TOKEN_CONTENT),
        (changed(request="hr-run1-7-zzzzzzzz-5-" + REQUEST.digest), Reason.TOKEN_CONTENT),
        (changed(tokens=4), Reason.TOKEN_COUNT),
        (with_tensor("token_ids", shape=(4,)), Reason.TOKEN_COUNT),
        (with_tensor("token_ids", shape=(5, 1)), Reason.TOKEN_COUNT),
        (changed(boundaries=(2, 4)), Reason.LAYERS),
        (changed(boundaries=(6, 4, 2)), Reason.LAYERS),
        (changed(final_state="post_norm"), Reason.LAYERS),
        (with_tensor("aux", shape=(5, 16)), Reason.SHAPE),
        (with_tensor("aux", shape=(4, 24)), Reason.SHAPE),
        (with_tensor("final", shape=(5, 16)), Reason.SHAPE),
        (with_tensor("final", dtype="F16"), Reason.SHAPE),
        (changed(tensors=dump_layout(5, 3, HIDDEN, "I64")), Reason.SHAPE),
        (with_stats(1, not_finite=1), Reason.NOT_FINITE),
        (with_stats(3, norm_max=math.inf), Reason.NOT_FINITE),
        (with_stats(3, norm_min=math.nan), Reason.NOT_FINITE),
        (with_stats(0, norm_min=0.0), Reason.DEGENERATE),
        (with_stats(3, norm_min=-1.0), Reason.DEGENERATE),
        (changed(engine="engine 2"), Reason.ENGINE_CHANGED),
        (changed(weight_version="w2"), Reason.WEIGHTS_CHANGED),
        (changed(stats=STATS[:3]), Reason.UNREADABLE),
        (changed(stats=STATS[::-1]), Reason.UNREADABLE),
        (changed(stats=()), Reason.UNREADABLE),
    ],
)
def test_what_is_wrong_is_refused_for_its_reason(dump: Dump, reason: Reason) -> None:
    assert reason_of(dump) is reason


def test_two_prompts_of_one_length_are_told_apart() -> None:
    other = RequestId.make("run1", 8, "abcd1234", [11, 12, 13, 14, 99])
    assert reason_of(changed(request=str(other)), other) is Reason.TOKEN_CONTENT


def test_rows_of_a_chunk_left_out_are_told_from_the_request() -> None:
    longer = RequestId.make("run1", 7, "abcd1234", [*IDS, 16])
    assert reason_of(changed(request=str(longer)), longer) is Reason.TOKEN_COUNT


@given(ids=st.lists(st.integers(0, 20), min_size=1, max_size=8))
def test_other_token_ids_never_match(ids: list[int]) -> None:
    assume(ids != IDS)
    encoded = encode_ids(ids)
    assert reason_of(replace(DUMP, token_ids=encoded)) is Reason.TOKEN_CONTENT
    whole = changed(tokens=len(ids), tensors=dump_layout(len(ids), 3, HIDDEN, "BF16"))
    assert reason_of(replace(whole, token_ids=encoded)) in (Reason.TOKEN_CONTENT, Reason.TOKEN_COUNT)


PROVEN: dict[str, st.SearchStrategy[Any]] = {
    "request": st.text(max_size=70),
    "tokens": st.integers(-1, 1 << 40),
    "boundaries": st.lists(st.integers(0, 8), max_size=4).map(tuple),
    "final_state": st.text(max_size=9),
    "weight_version": st.text(max_size=3),
    "engine": st.text(max_size=9),
    "stats": st.permutations(STATS).map(tuple) | st.just(STATS[1:]),
    "tensors": st.builds(
        dump_layout, st.integers(0, 9), st.integers(0, 9), st.integers(0, 16), st.sampled_from(["BF16", "I64", "U8"])
    ),
}


@given(data=st.data(), name=st.sampled_from(sorted(PROVEN)))
def test_a_header_with_any_one_proven_field_changed_never_matches(data: st.DataObject, name: str) -> None:
    value = data.draw(PROVEN[name])
    assume(value != getattr(HEADER, name))
    assert reason_of(changed(**{name: value})) in MISMATCHES


@given(
    index=st.integers(0, 3),
    change=st.one_of(
        st.builds(dict, layer=st.text(max_size=5)),
        st.builds(dict, not_finite=st.integers()),
        st.builds(dict, norm_min=st.floats(max_value=0) | st.sampled_from([math.nan, math.inf])),
        st.builds(dict, norm_max=st.sampled_from([math.nan, math.inf, -math.inf])),
    ),
)
def test_statistics_that_any_row_could_not_have_never_match(index: int, change: dict[str, Any]) -> None:
    assume(replace(STATS[index], **change) != STATS[index])
    assert reason_of(with_stats(index, **change)) in (Reason.NOT_FINITE, Reason.DEGENERATE, Reason.UNREADABLE)


@given(name=st.sampled_from(["aux", "final", "token_ids"]), shape=st.lists(st.integers(0, 30), max_size=3).map(tuple))
def test_a_tensor_of_another_shape_never_matches(name: str, shape: tuple[int, ...]) -> None:
    assume(shape != HEADER.tensors[name].shape)
    assert reason_of(with_tensor(name, shape=shape)) in (Reason.SHAPE, Reason.TOKEN_COUNT)


def test_reasons_are_mismatches_losses_or_duplicates() -> None:
    assert not MISMATCHES & LOSSES
    assert set(Reason) == MISMATCHES | LOSSES | {Reason.DUPLICATE}
    assert {Reason.PREFIX_CACHED, Reason.INCOMPLETE} == MISMATCHES & LOST_REASONS


def test_a_requirement_is_that_of_the_runs_spec() -> None:
    spec = make_spec(boundaries=BOUNDARIES, hidden_size=HIDDEN)
    assert Requirement.of(spec, IDENTITY) == REQUIREMENT

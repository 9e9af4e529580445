from __future__ import annotations

import json
from dataclasses import asdict, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.errors import Unreadable
from headrace.runs import MAX_TOTAL, RunSpec
from headrace.verdicts import Requirement
from tests.support.bus_values import make_spec

SPEC = make_spec(total=100)

texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
numbers = st.integers(0, 1 << 40)
counts = st.integers(1, 1 << 40)
specs = st.builds(
    RunSpec,
    run=texts,
    dataset=texts,
    total=st.integers(0, MAX_TOTAL),
    model=texts,
    model_digest=texts,
    engine_model=texts,
    boundaries=st.sets(numbers, min_size=1, max_size=4).map(lambda some: tuple(sorted(some))),
    final_state=st.sampled_from(["pre_norm", "post_norm"]),
    hidden_size=counts,
    format=texts,
    output=texts,
    max_attempts=counts,
    schema=st.just(1),
)


@given(spec=specs)
def test_a_spec_round_trips_and_keeps_its_digest(spec: RunSpec) -> None:
    again = RunSpec.decode(spec.encode())
    assert again == spec
    assert again.digest == spec.digest
    assert spec.differences(again) == []


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("run", "run2"),
        ("dataset", "e" * 16),
        ("total", 101),
        ("model_digest", "d" * 16),
        ("engine_model", "n"),
        ("boundaries", (2, 4, 7)),
        ("final_state", "post_norm"),
        ("hidden_size", 65),
        ("format", "speculators"),
    ],
)
def test_what_makes_the_extraction_changes_the_digest_and_is_named(name: str, value: Any) -> None:
    other = replace(SPEC, **{name: value})
    assert other.digest != SPEC.digest
    assert [line.split(":")[0] for line in SPEC.differences(other)] == [name]


def test_the_places_and_the_attempts_do_not_make_another_extraction() -> None:
    assert replace(SPEC, output="/elsewhere", model="/moved", max_attempts=9).digest == SPEC.digest


def test_a_newer_schema_says_to_upgrade() -> None:
    with pytest.raises(Unreadable, match="upgrade"):
        RunSpec.decode(json.dumps({**asdict(SPEC), "schema": 2}).encode())


@pytest.mark.parametrize(
    "changes",
    [
        {"colour": "red"},
        {"total": "100"},
        {"total": 1.0},
        {"total": True},
        {"run": 1},
        {"boundaries": ["2"]},
        {"boundaries": "246"},
        {"boundaries": None},
        {"schema": "1"},
        {"schema": None},
        {"output": None},
    ],
)
def test_an_unknown_name_or_a_wrong_type_is_unreadable(changes: dict[str, Any]) -> None:
    with pytest.raises(Unreadable, match="run spec"):
        RunSpec.decode(json.dumps({**asdict(SPEC), **changes}).encode())


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("total", -1),
        ("total", MAX_TOTAL + 1),
        ("total", 10**12),
        ("boundaries", []),
        ("boundaries", [-1, 2]),
        ("boundaries", [4, 2]),
        ("boundaries", [2, 2]),
        ("final_state", "mid_norm"),
        ("hidden_size", 0),
        ("max_attempts", 0),
        ("schema", 0),
        ("schema", -1),
    ],
)
def test_a_value_that_no_run_has_is_unreadable_and_named(name: str, value: Any) -> None:
    with pytest.raises(Unreadable, match=f"run spec: {name} "):
        RunSpec.decode(json.dumps({**asdict(SPEC), name: value}).encode())


@pytest.mark.parametrize("name", sorted(asdict(SPEC)))
def test_a_missing_name_is_unreadable(name: str) -> None:
    table = asdict(SPEC)
    del table[name]
    with pytest.raises(Unreadable, match=name):
        RunSpec.decode(json.dumps(table).encode())


@pytest.mark.parametrize("data", [b"", b"{", b"[]", b"7", b"null", b'"x"', b"\xff", b"[" * 100_000])
def test_what_is_no_spec_is_unreadable(data: bytes) -> None:
    with pytest.raises(Unreadable):
        RunSpec.decode(data)


@pytest.mark.parametrize(
    ("form", "captured", "stored"),
    [
        ("headrace", "pre_norm", "pre_norm"),
        ("headrace", "post_norm", "post_norm"),
        ("specforge", "pre_norm", "post_norm"),
        ("specforge", "post_norm", "post_norm"),
        ("of a later version", "pre_norm", "pre_norm"),
    ],
)
def test_the_format_says_which_final_state_rows_hold(form: str, captured: str, stored: str) -> None:
    spec = replace(SPEC, format=form, final_state=captured)
    assert (spec.stored_state, spec.needs_norm) == (stored, captured != stored)
    assert Requirement.of(spec, None).final_state == captured
    assert Requirement.of(spec, None, stored=True).final_state == stored

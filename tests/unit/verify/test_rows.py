"""Every row is read: each kind of damage to a row has its name, its place and its line of detail."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headrace.tensorfile import decode_header
from headrace_cli.verify import Kind
from tests.support.datasets import (
    BOUNDARIES,
    HIDDEN,
    LENGTHS,
    TOTAL,
    Array,
    Recipe,
    States,
    build,
    commit,
    edit_lines,
    row_path,
)
from tests.support.verified import check, kinds


def patch(path: Path, tensor: str, change: Callable[[memoryview], None]) -> None:
    """Change a tensor's bytes in a row's file."""
    data = bytearray(path.read_bytes())
    tensors, _, offset = decode_header(bytes(data), len(data))
    info = tensors[tensor]
    change(memoryview(data)[offset + info.begin : offset + info.end])
    path.write_bytes(data)


def flip(data: memoryview) -> None:
    data[len(data) // 2] ^= 1


def swap(folder: Path, one: int, two: int) -> None:
    """Exchange two rows' files."""
    first, second = row_path(folder, one), row_path(folder, two)
    kept = first.read_bytes()
    first.write_bytes(second.read_bytes())
    second.write_bytes(kept)


@pytest.mark.parametrize("tensor", ["aux", "final"])
def test_a_flipped_bit_of_the_states_breaks_the_checksum(dataset: Path, tensor: str) -> None:
    patch(row_path(dataset, 4), tensor, flip)
    report = check(dataset)
    assert kinds(report) == {4: [Kind.CHECKSUM]}
    assert report.problems[0].where == "rows/000000/000000004.safetensors"


def test_a_flipped_bit_of_the_token_ids_is_named_as_such_too(dataset: Path) -> None:
    patch(row_path(dataset, 4), "token_ids", flip)
    report = check(dataset)
    assert kinds(report) == {4: [Kind.CHECKSUM, Kind.TOKEN_IDS]}
    assert "from token 32 on" in report.problems[1].detail


def test_a_flipped_bit_anywhere_in_the_file_is_seen(dataset: Path) -> None:
    path = row_path(dataset, 0)
    data = path.read_bytes()
    for position in range(0, len(data), max(1, len(data) // 60)):
        path.write_bytes(data[:position] + bytes([data[position] ^ 4]) + data[position + 1 :])
        report = check(dataset)
        assert {problem.ordinal for problem in report.problems} == {0}, position


@pytest.mark.parametrize("left", [0, 5, 100, 4000])
def test_a_truncated_row_is_named_by_its_size(dataset: Path, left: int) -> None:
    path = row_path(dataset, 4)
    size = path.stat().st_size
    path.write_bytes(path.read_bytes()[:left])
    report = check(dataset)
    assert kinds(report) == {4: [Kind.SIZE]}
    assert report.problems[0].detail.startswith(f"{left} bytes, its line says {size}; ")


def test_a_row_that_was_published_torn_is_unreadable(dataset: Path) -> None:
    path = row_path(dataset, 4)
    path.write_bytes(path.read_bytes()[:-8])
    commit(dataset, 4)
    assert kinds(check(dataset)) == {4: [Kind.UNREADABLE]}


def test_a_link_in_a_rows_place_is_unreadable(dataset: Path, tmp_path: Path) -> None:
    path = row_path(dataset, 4)
    path.rename(tmp_path / "row")
    path.symlink_to(tmp_path / "row")
    assert kinds(check(dataset)) == {4: [Kind.UNREADABLE]}


@pytest.mark.parametrize(("one", "two"), [(1, 2), (3, 7)])
def test_two_rows_that_changed_places_name_each_other(dataset: Path, one: int, two: int) -> None:
    swap(dataset, one, two)
    report = check(dataset)
    assert kinds(report) == {one: [Kind.SWAPPED], two: [Kind.SWAPPED]}
    details = {problem.ordinal: problem.detail for problem in report.problems}
    assert f"ordinal {two} " in details[one]
    assert f"ordinal {one} " in details[two]


def test_two_rows_that_changed_places_under_right_checksums_are_seen(dataset: Path) -> None:
    swap(dataset, 1, 2)
    commit(dataset, 1)
    commit(dataset, 2)
    assert kinds(check(dataset)) == {1: [Kind.SWAPPED], 2: [Kind.SWAPPED]}


def test_exchanged_token_ids_name_their_owner_without_the_rows_metadata(dataset: Path) -> None:
    one, two = row_path(dataset, 1).read_bytes(), row_path(dataset, 2).read_bytes()
    tensors, _, offset = decode_header(one, len(one))
    ids = slice(offset + tensors["token_ids"].begin, offset + tensors["token_ids"].end)
    data = bytearray(one)
    data[ids] = two[ids]
    row_path(dataset, 1).write_bytes(data)
    commit(dataset, 1)
    report = check(dataset)
    assert kinds(report) == {1: [Kind.SWAPPED]}
    assert "ordinal 2 " in report.problems[0].detail


def test_token_ids_of_no_sample_are_named(dataset: Path) -> None:
    patch(row_path(dataset, 1), "token_ids", flip)
    commit(dataset, 1)
    assert kinds(check(dataset)) == {1: [Kind.TOKEN_IDS]}


def test_without_inputs_the_request_still_proves_the_token_ids(dataset: Path) -> None:
    patch(row_path(dataset, 1), "token_ids", flip)
    commit(dataset, 1)
    shutil.rmtree(dataset / "inputs")
    assert kinds(check(dataset)) == {None: [Kind.INPUTS], 1: [Kind.TOKEN_IDS]}


def test_a_mask_that_is_not_the_inputs_is_named(model: Path, states: States, tmp_path: Path) -> None:
    dataset = build(tmp_path, model, states, Recipe(masks={3: [0] * 10 + [1] * 7}))
    report = check(dataset)
    assert kinds(report) == {3: [Kind.LOSS_MASK]}
    assert report.problems[0].detail == "trains 7 of 17 tokens, not the 9 of the inputs' mask"


@pytest.mark.parametrize("dtype", ["F32", "F16", "BF16"])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_a_value_that_is_not_finite_is_named_by_token_and_boundary(
    model: Path, states: States, tmp_path: Path, dtype: str, value: float
) -> None:
    def spoil(ordinal: int, aux: Array, final: Array) -> tuple[Array, Array]:
        if ordinal == 4:
            aux[11, HIDDEN + 3] = value
        if ordinal == 5:
            final[32, HIDDEN - 1] = value
        return aux, final

    report = check(build(tmp_path, model, states, Recipe(dtype=dtype, alter=spoil)))
    assert kinds(report) == {4: [Kind.NOT_FINITE], 5: [Kind.NOT_FINITE]}
    assert report.problems[0].detail.endswith(f"the first: token 11 at boundary {BOUNDARIES[1]}")
    assert report.problems[1].detail.endswith("the first: token 32 at the final state")


@pytest.mark.parametrize("dtype", ["F32", "F16", "BF16"])
@pytest.mark.parametrize("zero", [0.0, -0.0])
def test_a_state_of_zeros_at_one_boundary_is_named(
    model: Path, states: States, tmp_path: Path, dtype: str, zero: float
) -> None:
    def spoil(ordinal: int, aux: Array, final: Array) -> tuple[Array, Array]:
        if ordinal == 7:
            aux[5:7, 2 * HIDDEN :] = zero
        return aux, final

    report = check(build(tmp_path, model, states, Recipe(dtype=dtype, alter=spoil)))
    assert kinds(report) == {7: [Kind.ZERO_ROW]}
    assert report.problems[0].detail == (
        f"2 of {LENGTHS[7] * 3} state vectors are all zeros, the first: token 5 at boundary {BOUNDARIES[2]}"
    )


def test_large_finite_values_and_single_zeros_are_fine(model: Path, states: States, tmp_path: Path) -> None:
    def spoil(_ordinal: int, aux: Array, final: Array) -> tuple[Array, Array]:
        aux[:, 3] = 60000.0
        final[:, 1:] = 0.0
        return aux, final

    assert check(build(tmp_path, model, states, Recipe(dtype="F16", alter=spoil))).ok


@pytest.mark.parametrize(
    ("spec", "kind", "said"),
    [
        ({"hidden_size": 2 * HIDDEN}, Kind.SHAPE, "expected (5, 384) and (5, 128)"),
        ({"final_state": "post_norm"}, Kind.ORIGIN, "final state 'pre_norm', expected 'post_norm'"),
        ({"engine_model": "other"}, Kind.ORIGIN, "model 'tiny', expected 'other'"),
    ],
)
def test_rows_of_another_spec_than_headrace_json_are_named(
    dataset: Path, spec: dict[str, Any], kind: Kind, said: str
) -> None:
    (name, value), *_ = spec.items()
    for path in (dataset / "headrace.json", dataset / "inputs" / "run.json"):
        text = path.read_text()
        for separator in (": ", ":"):
            for old in (str(HIDDEN), '"pre_norm"', '"tiny"'):
                new = str(value) if isinstance(value, int) else f'"{value}"'
                text = text.replace(f'"{name}"{separator}{old}', f'"{name}"{separator}{new}')
        path.write_text(text)
    report = check(dataset)
    assert report.counts == {kind: TOTAL - 2}
    assert said in report.problems[0].detail


@pytest.mark.parametrize(("field", "said"), [("engine", "engine"), ("weight_version", "weights")])
def test_rows_of_another_engine_or_other_weights_are_named(dataset: Path, field: str, said: str) -> None:
    path = dataset / "headrace.json"
    path.write_text(path.read_text().replace(f'"{field}": "', f'"{field}": "not '))
    report = check(dataset)
    assert report.counts == {Kind.ORIGIN: TOTAL - 2}
    assert said in report.problems[0].detail


def test_metadata_that_disagree_with_the_line_are_named(dataset: Path) -> None:
    path = row_path(dataset, 3)
    path.write_bytes(path.read_bytes().replace(b'"sample":"sample-3"', b'"sample":"sample-4"'))
    commit(dataset, 3)
    report = check(dataset)
    assert kinds(report) == {3: [Kind.ORIGIN]}
    assert "sample 'sample-4', expected 'sample-3'" in report.problems[0].detail


def test_many_problems_are_counted_and_the_first_kept(dataset: Path) -> None:
    edit_lines(dataset, lambda lines: [line | {"ordinal": 5000 + n} for line in lines for n in range(110)])
    report = check(dataset)
    assert report.counts[Kind.WRONG_LINE] == TOTAL * 110
    assert len(report.problems) == 1000

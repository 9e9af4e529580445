"""Datasets whose rows are SpecForge's: what is verified goes by the format, and by the final state that it stores."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from headrace.errors import UsageError
from headrace.finalnorm import NORM_FILE, FinalNorm
from headrace_cli.verify import Kind, Report, verify
from headrace_cli.verify.head import norm_difference
from headrace_writer import formats
from tests.support.datasets import LENGTHS, Alter, Recipe, States, build, commit, norm_of, row_path
from tests.support.dumps import make_norm
from tests.support.verified import check, kinds, only

FORM = formats.get("specforge")


def make(
    folder: Path,
    model: Path,
    states: States,
    *,
    dtype: str = "F32",
    final_state: str = "pre_norm",
    alter: Alter | None = None,
    other_norm: bool = False,
) -> Path:
    norm = make_norm(64, dtype) if other_norm else norm_of(model, dtype)
    spec = {"format": "specforge"}
    recipe = Recipe(dtype=dtype, final_state=final_state, alter=alter, norm=norm, spec=spec)
    return build(folder, model, states, recipe)


@pytest.fixture(scope="module")
def rows(model: Path, states: States, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(tmp_path_factory.mktemp("specforge"), model, states)


@pytest.fixture
def dataset(rows: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(rows, tmp_path / "dataset"))


def recomputed(folder: Path, model: Path) -> Report:
    return verify(folder, model=model, sample=0, all_rows=True, semantic=True, tolerance=None, progress=None)


@pytest.mark.parametrize("dtype", ["F32", "F16", "BF16"])
@pytest.mark.parametrize("final_state", ["pre_norm", "post_norm"])
def test_sound_rows_verify_whatever_was_captured(
    tmp_path: Path, model: Path, states: States, dtype: str, final_state: str
) -> None:
    report = recomputed(make(tmp_path, model, states, dtype=dtype, final_state=final_state), model)
    assert report.ok, report.problems
    assert report.rows == len(LENGTHS)
    assert report.recomputed is not None
    assert report.recomputed.rows == len(LENGTHS)
    assert report.ranks is not None


def test_rows_made_with_another_norm_are_not_what_the_model_computes(
    tmp_path: Path, model: Path, states: States
) -> None:
    report = recomputed(make(tmp_path, model, states, other_norm=True), model)
    assert set(kinds(report)) == {None, *range(len(LENGTHS))}
    *states_of_rows, norm = report.problems
    assert all(problem.kind is Kind.STATES and problem.detail.startswith("final") for problem in states_of_rows)
    assert (norm.kind, norm.where) == (Kind.DATASET, NORM_FILE)
    assert norm.detail == f"not the final norm of {model}: 64 of 64 weights differ, eps is 1e-05, there 1e-05"


def test_a_final_state_before_the_norm_is_named_as_such(tmp_path: Path, model: Path, states: States) -> None:
    def not_normed(ordinal: int, aux: object, _: object) -> tuple[object, object]:
        return aux, states.pre_norm[ordinal]

    report = recomputed(make(tmp_path, model, states, final_state="post_norm", alter=not_normed), model)  # type: ignore[arg-type]
    assert set(kinds(report)) == set(range(len(LENGTHS)))
    assert all("matches layer 8's input better" in problem.detail for problem in report.problems)


def test_a_flipped_byte_is_found(dataset: Path) -> None:
    place = row_path(dataset, 3, "specforge")
    data = bytearray(place.read_bytes())
    data[len(data) // 2] ^= 1
    place.write_bytes(data)
    problem = only(check(dataset))
    assert (problem.kind, problem.ordinal, problem.where) == (Kind.CHECKSUM, 3, "rows/rows_0-2000/data_3.ckpt")


def test_a_missing_row_and_one_without_a_line_are_found_by_the_formats_path(dataset: Path) -> None:
    row_path(dataset, 3, "specforge").rename(dataset / "rows" / "rows_0-2000" / "data_03.ckpt")
    report = check(dataset)
    assert [(problem.kind, problem.where) for problem in report.problems] == [
        (Kind.FOREIGN_FILE, "rows/rows_0-2000/data_03.ckpt"),
        (Kind.MISSING_ROW, "rows/rows_0-2000/data_3.ckpt"),
    ]


def test_two_swapped_rows_are_told_apart_by_their_own_ids(dataset: Path) -> None:
    first, second = row_path(dataset, 1, "specforge"), row_path(dataset, 4, "specforge")
    data = first.read_bytes()
    first.write_bytes(second.read_bytes())
    second.write_bytes(data)
    for ordinal in (1, 4):
        commit(dataset, ordinal, "specforge")
    assert kinds(check(dataset)) == {1: [Kind.SWAPPED], 4: [Kind.SWAPPED]}


def test_a_row_that_says_another_final_state_is_found(dataset: Path) -> None:
    place = row_path(dataset, 2, "specforge")
    place.write_bytes(place.read_bytes().replace(b'"final_state": "post_norm"', b'"final_state": "pre_norm" '))
    commit(dataset, 2, "specforge")
    problem = only(check(dataset))
    assert problem.kind is Kind.ORIGIN
    assert "final state 'pre_norm', expected 'post_norm'" in problem.detail


def flipped(norm: FinalNorm) -> bytes:
    data = bytearray(norm.encode())
    data[-3] ^= 0x40
    return bytes(data)


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"torn", "too few"),
        (make_norm(32, "F32").encode(), "a weight of width 32, the run has 64"),
        (flipped(make_norm(64, "F32")), "damaged: checksum 'xxh3:"),
        (None, "missing, though rows were made with it"),
    ],
    ids=["torn", "narrow", "flipped", "missing"],
)
def test_a_damaged_or_missing_final_norm_is_found(dataset: Path, model: Path, data: bytes | None, says: str) -> None:
    (dataset / NORM_FILE).unlink()
    if data is not None:
        (dataset / NORM_FILE).write_bytes(data)
    for report in (check(dataset), recomputed(dataset, model)):
        problem = only(report)
        assert (problem.kind, problem.where) == (Kind.DATASET, NORM_FILE)
        assert says in problem.detail
        assert problem.detail.endswith("the engine's own lies in its dump folder as final_norm.*.safetensors")


def test_another_norm_that_took_the_place_of_the_models_is_found(dataset: Path, model: Path) -> None:
    norm = norm_of(model)
    for other, says in (
        (
            replace(norm, weight=b"\x00\x00\x80\x40" + norm.weight[4:]),
            "1 of 64 weights differ, eps is 1e-05, there 1e-05",
        ),
        (replace(norm, eps=1e-6), "0 of 64 weights differ, eps is 1e-06, there 1e-05"),
    ):
        (dataset / NORM_FILE).write_bytes(other.encode())
        assert norm_difference(other, model) == says
        problem = only(check(dataset))
        assert (problem.kind, problem.where) == (Kind.DATASET, NORM_FILE)
        assert problem.detail.startswith(f"{other.digest}, the engine of the rows publishes {norm.digest}")


def test_a_checkpoint_whose_norm_cannot_be_read_is_not_compared(dataset: Path, model: Path, tmp_path: Path) -> None:
    copied = Path(shutil.copytree(model, tmp_path / "copied"))
    config = json.loads((copied / "config.json").read_text())
    (copied / "config.json").write_text(json.dumps({**config, "rms_norm_eps": None}))
    with pytest.raises(UsageError, match="no final RMSNorm weight"):
        norm_difference(norm_of(model), copied)


def test_a_norm_is_missing_only_where_rows_were_made_with_it(tmp_path: Path, model: Path, states: States) -> None:
    whole = make(tmp_path, model, states, final_state="post_norm")
    (whole / NORM_FILE).unlink()
    assert check(whole).ok

"""The books of a dataset: what is counted, and what each kind of damage is called."""

from __future__ import annotations

import math
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from headrace.errors import RunIncomplete, Unavailable, UsageError
from headrace_cli.verify import Kind, verify
from tests.support.datasets import (
    FAILED,
    REJECTED,
    TOTAL,
    Recipe,
    States,
    build,
    edit_lines,
    fingerprint,
    line_of,
    row_path,
)
from tests.support.verified import check, counted, only

Damage = Callable[[Path], object]


def test_a_sound_dataset_has_no_problem_and_nothing_is_written(dataset: Path) -> None:
    before = fingerprint(dataset)
    report = check(dataset)
    assert report.ok
    assert report.complete
    assert report.problems == ()
    assert report.notes == ()
    assert counted(report) == (TOTAL, TOTAL - 2, 1, 1, 0)
    assert report.rows == TOTAL - 2
    assert report.bytes == sum(line_of(dataset, ordinal).bytes for ordinal in range(TOTAL - 2))
    assert fingerprint(dataset) == before


def test_progress_ends_at_the_total(dataset: Path) -> None:
    seen: list[tuple[int, int]] = []
    verify(
        dataset,
        model=None,
        sample=0,
        all_rows=False,
        semantic=False,
        tolerance=None,
        progress=lambda done, total: seen.append((done, total)),
    )
    assert seen[0] == (1, TOTAL)
    assert seen[-1] == (TOTAL, TOTAL)


def test_a_row_without_its_line_is_a_lost_line(dataset: Path) -> None:
    edit_lines(dataset, lambda lines: [line for line in lines if line["ordinal"] != 3])
    report = check(dataset)
    problem = only(report)
    assert (problem.kind, problem.ordinal) == (Kind.LOST_LINE, 3)
    assert problem.where == "rows/000000/000000003.safetensors"
    assert counted(report) == (TOTAL, TOTAL - 3, 1, 1, 1)
    assert not report.complete


def test_a_row_whose_sample_failed_is_a_lost_line_too(dataset: Path) -> None:
    place = row_path(dataset, FAILED)
    shutil.copyfile(row_path(dataset, 3), place)
    problem = only(check(dataset))
    assert (problem.kind, problem.ordinal) == (Kind.LOST_LINE, FAILED)
    assert "failed" in problem.detail


def test_a_line_without_its_row_is_a_missing_row(dataset: Path) -> None:
    row_path(dataset, 5).unlink()
    problem = only(check(dataset))
    assert (problem.kind, problem.ordinal, problem.where) == (
        Kind.MISSING_ROW,
        5,
        "rows/000000/000000005.safetensors",
    )


def test_a_sample_without_line_and_row_is_open_and_no_problem(dataset: Path) -> None:
    row_path(dataset, 5).unlink()
    edit_lines(dataset, lambda lines: [line for line in lines if line["ordinal"] != 5])
    report = check(dataset)
    assert report.ok
    assert not report.complete
    assert report.open == 1
    assert report.notes == ("1 samples have no line yet: 5",)


@pytest.mark.parametrize("ordinals", [{REJECTED}, {FAILED}, {REJECTED, FAILED}])
def test_a_lost_line_of_a_sample_without_a_row_leaves_it_open(dataset: Path, ordinals: set[int]) -> None:
    edit_lines(dataset, lambda lines: [line for line in lines if line["ordinal"] not in ordinals])
    report = check(dataset)
    assert report.ok
    assert (report.open, report.complete) == (len(ordinals), False)
    with pytest.raises(RunIncomplete, match=f"{len(ordinals)} samples are open"):
        report.require_whole()


@pytest.mark.parametrize(
    "name",
    [
        "rows/notes.txt",
        "rows/000000/000000003.safetensors.part",
        "rows/000000/000000999.safetensors",
        "rows/000001/000000003.safetensors",
        "rows/000000/3.safetensors",
    ],
)
def test_a_file_among_the_rows_that_is_no_row_of_the_run_is_foreign(dataset: Path, name: str) -> None:
    (dataset / name).parent.mkdir(exist_ok=True)
    (dataset / name).write_bytes(b"x")
    problem = only(check(dataset))
    assert (problem.kind, problem.where) == (Kind.FOREIGN_FILE, name)


def test_a_link_to_a_folder_among_the_rows_is_foreign_and_not_followed(dataset: Path, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "file").touch()
    (dataset / "rows" / "more").symlink_to(tmp_path / "elsewhere")
    problem = only(check(dataset))
    assert (problem.kind, problem.where) == (Kind.FOREIGN_FILE, "rows/more")


def _remove_dataset_file(folder: Path) -> None:
    (folder / "headrace.json").unlink()


def _damage_dataset_file(folder: Path) -> None:
    (folder / "headrace.json").write_text('{"schema": 1, "spec"')


def _other_run(folder: Path) -> None:
    path = folder / "headrace.json"
    path.write_text(path.read_text().replace('"run": "proof"', '"run": "proo"'))


@pytest.mark.parametrize("damage", [_remove_dataset_file, _damage_dataset_file])
def test_the_rows_are_checked_although_headrace_json_is_not_there(dataset: Path, damage: Damage) -> None:
    damage(dataset)
    report = check(dataset)
    assert (only(report).kind, only(report).where) == (Kind.DATASET, "headrace.json")
    assert report.rows == TOTAL - 2


def test_headrace_json_of_another_extraction_than_the_inputs_is_named(dataset: Path) -> None:
    _other_run(dataset)
    problem = check(dataset).problems[0]
    assert problem.kind is Kind.DATASET
    assert "run: 'proo', not 'proof'" in problem.detail


def test_a_dataset_without_any_row_needs_no_headrace_json(model: Path, states: States, tmp_path: Path) -> None:
    dataset = build(tmp_path, model, states, Recipe(leave_out=frozenset(range(TOTAL))))
    assert not (dataset / "headrace.json").exists()
    report = check(dataset)
    assert report.ok
    assert counted(report) == (TOTAL, 0, 1, 1, TOTAL - 2)
    assert report.notes[-1] == "no headrace.json yet: the dataset holds no row"


def test_without_inputs_rows_are_still_proven_by_their_requests(dataset: Path) -> None:
    shutil.rmtree(dataset / "inputs")
    report = check(dataset)
    assert (only(report).kind, report.rows) == (Kind.INPUTS, TOTAL - 2)


def test_a_damaged_entry_of_the_inputs_is_named(dataset: Path) -> None:
    path = dataset / "inputs" / "samples.jsonl"
    path.write_bytes(path.read_bytes().replace(b'"ordinal":3,', b'"ordinal":4,'))
    problem = only(check(dataset))
    assert (problem.kind, problem.ordinal) == (Kind.INPUTS, 3)


def test_inputs_of_another_number_of_samples_are_not_used(dataset: Path) -> None:
    path = dataset / "headrace.json"
    path.write_text(path.read_text().replace(f'"total": {TOTAL}', f'"total": {TOTAL + 1}'))
    report = check(dataset)
    assert only(report).kind is Kind.DATASET
    assert report.open == 1


@pytest.mark.parametrize("make", [Path.mkdir, Path.touch, lambda _: None])
def test_what_is_no_dataset_is_refused(tmp_path: Path, make: Damage) -> None:
    make(tmp_path / "empty")
    with pytest.raises(UsageError, match="empty"):
        check(tmp_path / "empty")


def test_a_format_that_is_not_known_is_refused(model: Path, states: States, tmp_path: Path) -> None:
    folder = build(tmp_path, model, states, Recipe(leave_out=frozenset(range(TOTAL))))
    path = folder / "inputs" / "run.json"
    path.write_text(path.read_text().replace('"format":"headrace"', '"format":"headrase"'))
    with pytest.raises(UsageError, match="did you mean 'headrace'"):
        check(folder)


def _not_json(folder: Path) -> None:
    (folder / "headrace.json").write_text("{")


def _dataset_file_as_folder(folder: Path) -> None:
    (folder / "headrace.json").unlink(missing_ok=True)
    (folder / "headrace.json").mkdir()


@pytest.mark.parametrize(("damage", "why"), [(_not_json, "not JSON"), (_dataset_file_as_folder, "no regular file")])
def test_a_folder_without_readable_books_is_refused_with_the_reasons(tmp_path: Path, damage: Damage, why: str) -> None:
    damage(tmp_path)
    with pytest.raises(UsageError, match=rf"headrace\.json: .*{why}.*; inputs: .*holds no inputs"):
        check(tmp_path)


# Folders in the place of files and the like: permissions stop no test that runs as root.
def _folder_as_segment(folder: Path) -> None:
    (folder / "manifest" / "aaa.jsonl").mkdir()


def _dangling_segment(folder: Path) -> None:
    (folder / "manifest" / "aaa.jsonl").symlink_to(folder / "nowhere")


def _pipe_as_segment(folder: Path) -> None:
    os.mkfifo(folder / "manifest" / "aaa.jsonl")


@pytest.mark.parametrize("damage", [_folder_as_segment, _dangling_segment, _pipe_as_segment])
def test_a_segment_that_cannot_be_read_is_named_and_the_others_count(dataset: Path, damage: Damage) -> None:
    damage(dataset)
    report = check(dataset)
    assert (only(report).kind, only(report).where) == (Kind.UNREADABLE, "manifest/aaa.jsonl")
    assert counted(report) == (TOTAL, TOTAL - 2, 1, 1, 0)
    assert report.rows == TOTAL - 2


def test_a_row_under_another_samples_ids_finds_its_owner_past_a_segment_that_cannot_be_read(dataset: Path) -> None:
    _folder_as_segment(dataset)
    shutil.copyfile(row_path(dataset, 1), row_path(dataset, 3))
    details = [problem.detail for problem in check(dataset).problems if problem.kind is Kind.SWAPPED]
    assert [detail.partition(" (")[0] for detail in details] == ["holds the row of ordinal 1"]


@pytest.mark.parametrize("name", ["rows", "manifest"])
def test_a_file_in_the_place_of_a_folder_is_named(dataset: Path, name: str) -> None:
    shutil.rmtree(dataset / name)
    (dataset / name).touch()
    report = check(dataset)
    assert (report.problems[0].kind, report.problems[0].where) == (Kind.UNREADABLE, name)
    assert {problem.ordinal for problem in report.problems[1:]} == set(range(TOTAL - 2))


@pytest.mark.parametrize("name", ["headrace.json", "inputs/run.json", "inputs/samples.jsonl"])
def test_a_folder_in_the_place_of_a_file_of_the_books_is_named(dataset: Path, name: str) -> None:
    (dataset / name).unlink()
    (dataset / name).mkdir()
    report = check(dataset)
    assert only(report).kind is (Kind.DATASET if name == "headrace.json" else Kind.INPUTS)
    assert report.rows == TOTAL - 2


@pytest.mark.parametrize("total", [-1, 10**12])
def test_a_total_that_no_run_has_is_a_damaged_headrace_json(dataset: Path, total: int) -> None:
    path = dataset / "headrace.json"
    path.write_text(path.read_text().replace(f'"total": {TOTAL}', f'"total": {total}'))
    report = check(dataset)
    assert only(report).kind is Kind.DATASET
    assert f"total is {total}" in only(report).detail
    assert report.total == TOTAL


@pytest.mark.parametrize("tolerance", [math.nan, math.inf, -math.inf, 0.0, -1e-3])
def test_a_tolerance_that_is_no_finite_number_above_0_is_refused(dataset: Path, tolerance: float) -> None:
    with pytest.raises(UsageError, match="tolerance"):
        verify(dataset, model=None, sample=1, all_rows=False, semantic=False, tolerance=tolerance, progress=None)


@pytest.mark.skipif(os.geteuid() == 0, reason="permissions do not stop root")
@pytest.mark.parametrize("mode", [0o600, 0o300])
def test_a_folder_that_cannot_be_listed_or_searched_is_unavailable(dataset: Path, mode: int) -> None:
    dataset.chmod(mode)
    try:
        with pytest.raises(Unavailable, match="make it readable"):
            check(dataset)
    finally:
        dataset.chmod(0o700)

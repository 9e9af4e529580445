"""The books of a dataset: what is counted, and what each kind of damage is called."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from headrace.errors import Unavailable, UsageError
from headrace_cli.verify import Kind, Problem, Report, verify
from tests.support.datasets import (
    FAILED,
    REJECTED,
    TOTAL,
    Recipe,
    States,
    build,
    compute_states,
    edit_line,
    edit_lines,
    fingerprint,
    line_of,
    row_path,
    segment,
)
from tests.support.tiny_models import tiny_llama

Damage = Callable[[Path], object]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def states(model: Path) -> States:
    return compute_states(model)


@pytest.fixture(scope="module")
def pristine(model: Path, states: States, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("pristine"), model, states)


@pytest.fixture
def dataset(pristine: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(pristine, tmp_path / "dataset"))


def check(folder: Path) -> Report:
    """Verify all but the states."""
    return verify(folder, model=None, sample=0, all_rows=False, semantic=False, tolerance=None, progress=None)


def only(report: Report) -> Problem:
    (problem,) = report.problems
    assert not report.ok
    assert report.counts == {problem.kind: 1}
    assert "\n" not in problem.detail
    return problem


def books(report: Report) -> tuple[int, int, int, int, int]:
    return report.total, report.stored, report.rejected, report.failed, report.open


def test_a_sound_dataset_has_no_problem_and_nothing_is_written(dataset: Path) -> None:
    before = fingerprint(dataset)
    report = check(dataset)
    assert report.ok
    assert report.complete
    assert report.problems == ()
    assert report.notes == ()
    assert books(report) == (TOTAL, TOTAL - 2, 1, 1, 0)
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
    assert books(report) == (TOTAL, TOTAL - 3, 1, 1, 1)
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


def test_a_damaged_line_is_named_by_segment_and_number(dataset: Path) -> None:
    path = segment(dataset)
    lines = path.read_bytes().splitlines(keepends=True)
    lines[3] = lines[3].replace(b'"status":"stored"', b'"status":"sto')
    path.write_bytes(b"".join(lines))
    report = check(dataset)
    damaged = next(problem for problem in report.problems if problem.kind is Kind.DAMAGED_LINE)
    assert damaged.where == f"manifest/{path.name}:4"
    # Its row lost the line, too.
    assert report.counts == {Kind.DAMAGED_LINE: 1, Kind.LOST_LINE: 1}


def test_an_unterminated_tail_is_only_a_note(dataset: Path) -> None:
    path = segment(dataset)
    with path.open("ab") as file:
        file.write(b'{"ordinal":3,"sam')
    report = check(dataset)
    assert report.ok
    (note,) = report.notes
    assert note == f"manifest/{path.name}:{TOTAL + 1}: an unterminated tail of 17 bytes is ignored"


def test_a_torn_last_line_leaves_its_row_without_a_line(dataset: Path) -> None:
    # The last stored line, so that the tail is a row's.
    edit_lines(dataset, lambda lines: sorted(lines, key=lambda line: line["ordinal"] == 2))
    path = segment(dataset)
    path.write_bytes(path.read_bytes()[:-30])
    report = check(dataset)
    assert only(report).kind is Kind.LOST_LINE
    assert len(report.notes) == 1


def test_equal_lines_of_a_sample_count_once(dataset: Path) -> None:
    later = {"at": "2026-07-24T00:00:00Z"}
    edit_lines(dataset, lambda lines: [*lines, *(line | later for line in lines)])
    report = check(dataset)
    assert report.ok
    assert books(report) == (TOTAL, TOTAL - 2, 1, 1, 0)


@pytest.mark.parametrize("first", [True, False])
def test_of_two_lines_the_one_that_matches_the_file_counts(dataset: Path, first: bool) -> None:
    def add_stale(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
        stale = [lines[2] | {"checksum": "xxh3:" + "0" * 16}]
        return stale + lines if first else lines + stale

    edit_lines(dataset, add_stale)
    assert check(dataset).ok


def test_lines_of_which_none_matches_the_file_contradict(dataset: Path) -> None:
    def spoil(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
        rest = [line for line in lines if line["ordinal"] != 2]
        return [*rest, lines[2] | {"checksum": "xxh3:" + "0" * 16}, lines[2] | {"bytes": 12}]

    edit_lines(dataset, spoil)
    problem = only(check(dataset))
    assert (problem.kind, problem.ordinal) == (Kind.CONTRADICTION, 2)
    assert f"{segment(dataset).name}:{TOTAL}" in problem.detail


def test_stored_and_rejected_contradict(dataset: Path) -> None:
    rejected: dict[str, Any] = {"status": "rejected", "reason": "x", "path": "", "bytes": 0, "checksum": ""}
    edit_lines(dataset, lambda lines: [*lines, lines[2] | rejected])
    report = check(dataset)
    assert (only(report).kind, only(report).ordinal) == (Kind.CONTRADICTION, 2)
    assert books(report) == (TOTAL, TOTAL - 2, 1, 1, 0)


def test_a_sample_that_failed_and_was_stored_later_is_stored(dataset: Path) -> None:
    failed: dict[str, Any] = {"status": "failed", "reason": "x", "path": "", "bytes": 0, "checksum": ""}
    edit_lines(dataset, lambda lines: [lines[2] | failed, *lines])
    report = check(dataset)
    assert report.ok
    assert books(report) == (TOTAL, TOTAL - 2, 1, 1, 0)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"path": "rows/000000/000000004.safetensors"}, "the ordinal's is rows/000000/000000003.safetensors"),
        ({"sample": "sample-4"}, "the inputs say 'sample-3'"),
        ({"tokens": 16}, "the inputs have 17"),
        ({"boundaries": [2, 4, 6]}, "the run has [2, 4, 5]"),
        ({"proof": "count"}, "expected 'ids'"),
        ({"request": "req_3"}, "is not a headrace request id"),
        ({"request": "hr-proof-4-nonce000-17-0123456789abcdef"}, "is not one of run 'proof', ordinal 3"),
        ({"request": "hr-proof-3-nonce000-17-0123456789abcdef"}, "does not prove the inputs' token ids"),
    ],
)
def test_a_line_that_disagrees_with_the_run_or_the_inputs_is_named(
    dataset: Path, changes: dict[str, Any], said: str
) -> None:
    edit_line(dataset, 3, **changes)
    number = next(
        number for number, line in enumerate(segment(dataset).read_bytes().splitlines(), 1) if b'"ordinal":3,' in line
    )
    report = check(dataset)
    wrong = next(problem for problem in report.problems if problem.kind is Kind.WRONG_LINE)
    assert wrong.where == f"manifest/{segment(dataset).name}:{number}"
    assert wrong.ordinal == 3
    assert said in wrong.detail


@pytest.mark.parametrize(
    ("ordinal", "changes", "said"),
    [
        (REJECTED, {"status": "failed", "reason": "x"}, "the inputs reject the sample"),
        (REJECTED, {"reason": "empty"}, "the inputs say too_long"),
        (FAILED, {"reason": ""}, "without a reason"),
        (FAILED, {"path": "rows/000000/000000009.safetensors"}, "names the file"),
        (FAILED, {"request": "hr-proof-3-nonce000-17-0123456789abcdef"}, "ordinal 9"),
    ],
)
def test_a_line_without_a_row_is_checked_too(dataset: Path, ordinal: int, changes: dict[str, Any], said: str) -> None:
    edit_line(dataset, ordinal, **changes)
    problem = only(check(dataset))
    assert (problem.kind, problem.ordinal) == (Kind.WRONG_LINE, ordinal)
    assert said in problem.detail


def test_a_line_beyond_the_last_sample_is_wrong(dataset: Path) -> None:
    edit_lines(dataset, lambda lines: [*lines, lines[2] | {"ordinal": TOTAL}])
    problem = only(check(dataset))
    assert (problem.kind, problem.ordinal) == (Kind.WRONG_LINE, TOTAL)


def test_a_row_of_a_sample_that_the_inputs_reject_is_wrong(model: Path, states: States, tmp_path: Path) -> None:
    dataset = build(tmp_path, model, states, Recipe(reject=frozenset({4})))
    problem = only(check(dataset))
    assert (problem.kind, problem.ordinal) == (Kind.WRONG_LINE, 4)
    assert "the inputs reject the sample: too_long" in problem.detail


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
    assert books(report) == (TOTAL, 0, 1, 1, TOTAL - 2)
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


def test_a_manifest_that_cannot_be_read_is_unavailable(dataset: Path) -> None:
    # A folder in a segment's place: permissions stop no test that runs as root.
    (dataset / "manifest" / "zzz.jsonl").mkdir()
    with pytest.raises(Unavailable, match=r"zzz\.jsonl"):
        check(dataset)

"""The manifest's lines: which count, which contradict, and which are wrong."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from headrace_cli.verify import Kind
from tests.support.datasets import (
    FAILED,
    REJECTED,
    TOTAL,
    Recipe,
    States,
    build,
    edit_line,
    edit_lines,
    row_path,
    segment,
)
from tests.support.verified import check, counted, kinds, only


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
    assert counted(report) == (TOTAL, TOTAL - 2, 1, 1, 0)


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
    assert counted(report) == (TOTAL, TOTAL - 2, 1, 1, 0)


def test_a_sample_that_failed_and_was_stored_later_is_stored(dataset: Path) -> None:
    failed: dict[str, Any] = {"status": "failed", "reason": "x", "path": "", "bytes": 0, "checksum": ""}
    edit_lines(dataset, lambda lines: [lines[2] | failed, *lines])
    report = check(dataset)
    assert report.ok
    assert counted(report) == (TOTAL, TOTAL - 2, 1, 1, 0)


@pytest.mark.parametrize(("last", "rejected"), [("failed", 1), ("rejected", 2)])
def test_a_sample_that_was_tried_again_may_fail_again_or_be_rejected(dataset: Path, last: str, rejected: int) -> None:
    def add(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
        (line,) = (line for line in lines if line["ordinal"] == FAILED)
        again = [{"reason": "timeout"}, {"reason": "not_finite", "at": "2026-07-24T00:00:00Z"}, {"status": last}]
        return [*lines, *(line | changes for changes in again)]

    edit_lines(dataset, add)
    report = check(dataset)
    assert report.ok, report.problems
    assert counted(report) == (TOTAL, TOTAL - 2, rejected, 2 - rejected, 0)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"path": "rows/000000/000000004.safetensors"}, "the ordinal's is rows/000000/000000003.safetensors"),
        ({"sample": "sample-4"}, "the inputs say 'sample-3'"),
        ({"tokens": 16}, "the inputs have 17"),
        ({"boundaries": [2, 4, 6]}, "the run has [2, 4, 5]"),
        ({"proof": "count"}, "expected 'ids'"),
        ({"reason": "x"}, "with the reason 'x'"),
        ({"at": ""}, "at ''"),
        ({"at": "junk"}, "at 'junk'"),
        ({"at": "2026-07-23"}, "at '2026-07-23'"),
        ({"at": "2026-07-23T10:15:00+00:00"}, "expected UTC like"),
        ({"at": "2026-02-30T10:15:00Z"}, "expected UTC like"),
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
        (FAILED, {"at": "junk"}, "at 'junk'"),
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


def test_every_line_of_a_segment_of_another_run_is_named_and_none_speaks_for_a_row(dataset: Path) -> None:
    foreign = segment(dataset).read_bytes().replace(b"hr-proof-", b"hr-other-").replace(b"xxh3:", b"xxh3:0")
    (dataset / "manifest" / "000.jsonl").write_bytes(foreign)
    report = check(dataset)
    # The lines of samples without a row name no request: nothing tells them from the run's own.
    assert report.counts == {Kind.WRONG_LINE: TOTAL - 2}
    assert {problem.where.partition(":")[0] for problem in report.problems} == {"manifest/000.jsonl"}
    assert (report.rows, counted(report)) == (TOTAL - 2, (TOTAL, TOTAL - 2, 1, 1, 0))


def test_a_damaged_row_is_judged_by_its_own_line_beside_one_of_another_run(dataset: Path) -> None:
    foreign = segment(dataset).read_bytes().replace(b"hr-proof-", b"hr-other-")
    (dataset / "manifest" / "000.jsonl").write_bytes(foreign)
    path = row_path(dataset, 4)
    path.write_bytes(path.read_bytes()[:-1] + b"\x00\x00")
    assert Kind.SIZE in [problem.kind for problem in check(dataset).problems if problem.ordinal == 4]


def test_a_line_under_another_ordinal_is_named_beside_the_row_that_lost_it(dataset: Path) -> None:
    edit_lines(dataset, lambda lines: [line | {"ordinal": 3} if line["ordinal"] == 2 else line for line in lines])
    report = check(dataset)
    assert kinds(report) == {2: [Kind.LOST_LINE], 3: [Kind.WRONG_LINE]}


def test_a_repeated_line_with_a_malformed_time_is_named(dataset: Path) -> None:
    edit_lines(dataset, lambda lines: [*lines, lines[2] | {"at": "junk"}])
    assert (only(check(dataset)).kind, only(check(dataset)).ordinal) == (Kind.WRONG_LINE, 2)


@pytest.mark.parametrize("schema", [0, -1])
def test_a_line_of_a_schema_that_never_was_is_damaged(dataset: Path, schema: int) -> None:
    edit_line(dataset, FAILED, schema=schema)
    problem = only(check(dataset))
    assert problem.kind is Kind.DAMAGED_LINE
    assert f"schema {schema} was never written" in problem.detail

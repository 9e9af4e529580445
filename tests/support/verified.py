"""Verifies a dataset and looks at the report."""

from __future__ import annotations

from pathlib import Path

from headrace_cli.verify import Kind, Problem, Report, verify


def check(folder: Path) -> Report:
    """Verify all but the states."""
    return verify(folder, model=None, sample=0, all_rows=False, semantic=False, tolerance=None, progress=None)


def only(report: Report) -> Problem:
    """The one problem of a report, told in one line."""
    (problem,) = report.problems
    assert not report.ok
    assert report.counts == {problem.kind: 1}
    assert "\n" not in problem.detail
    return problem


def kinds(report: Report) -> dict[int | None, list[Kind]]:
    """The kinds of problem by ordinal, each told in one line."""
    table: dict[int | None, list[Kind]] = {}
    for problem in report.problems:
        assert "\n" not in problem.detail
        table.setdefault(problem.ordinal, []).append(problem.kind)
    return table


def counted(report: Report) -> tuple[int, int, int, int, int]:
    """Total, stored, rejected, failed and open."""
    return report.total, report.stored, report.rejected, report.failed, report.open

"""The report says the same to people and to programs."""

from __future__ import annotations

import json
from collections import Counter

import pytest
from rich.console import Console

from headrace_cli.verify import Kind, Problem, Ranks, Recomputed, Report, Worst, render
from headrace_cli.verify.problems import KEPT, Findings

WORST = Worst(name="boundary 2", frobenius=1e-6, median=2e-6, token=3e-6, nearest=0.4, ordinal=17)
RANKS = Ranks(rows=8, tokens=900, seconds=1.0, rate=0.44, lowest=0.31, control=0.02, conclusive=True)


def make_report(problems: int = 0) -> Report:
    findings = Findings()
    for ordinal in range(problems):
        findings.add(Kind.CHECKSUM, f"rows/[x]/{ordinal}", "xxh3:1,\nits line says xxh3:2", ordinal)
    return Report(
        folder="/data/[red]run",
        run="proof",
        total=12,
        stored=9,
        rejected=1,
        failed=1,
        open=1,
        rows=9,
        bytes=3 << 20,
        seconds=0.5,
        model="/models/tiny",
        recomputed=Recomputed(rows=8, tokens=900, seconds=3.0, worst=(WORST,)),
        ranks=RANKS,
        problems=tuple(findings.problems),
        counts=dict(findings.counts),
        notes=("1 samples have no line yet: 5",),
    )


def shown(report: Report) -> str:
    console = Console(width=160, force_terminal=False)
    with console.capture() as capture:
        console.print(render(report))
    return capture.get()


def test_a_sound_report_shows_books_speeds_and_errors() -> None:
    text = shown(make_report())
    assert "/data/[red]run  (run proof)" in text
    assert "12 samples = 9 stored + 1 rejected + 1 failed + 1 open" in text
    assert "9 checked, 3.0 MiB, 6.0 MiB/s" in text
    assert "8 rows, 900 tokens, 300 tokens/s" in text
    assert "0.440" in text
    assert "boundary 2" in text
    assert "note: 1 samples have no line yet: 5" in text
    assert "verified: nothing is wrong" in text


def test_problems_are_listed_up_to_a_screenful_and_counted() -> None:
    text = shown(make_report(70))
    assert "rows/[x]/0" in text
    assert "xxh3:1, its line says xxh3:2" in text
    assert "20 more; --json gives the first 70" in text
    assert "wrong: checksum 70" in text


def test_the_json_has_every_number_and_problem() -> None:
    report = make_report(2)
    table = json.loads(json.dumps(report.to_json()))
    assert table["ok"] is False
    assert table["complete"] is False
    assert table["counts"] == {"checksum": 2}
    assert table["problems"][1] == {
        "kind": "checksum",
        "where": "rows/[x]/1",
        "detail": "xxh3:1, its line says xxh3:2",
        "ordinal": 1,
    }
    assert table["recomputed"]["worst"][0]["median"] == 2e-6
    assert table["ranks"]["conclusive"] is True


@pytest.mark.parametrize("count", [0, 1, KEPT, KEPT + 5])
def test_findings_count_all_and_keep_the_first(count: int) -> None:
    findings = Findings()
    for index in range(count):
        findings.add(Kind.SIZE, str(index), "x")
    assert findings.counts == Counter({Kind.SIZE: count} if count else {})
    assert findings.problems == [Problem(kind=Kind.SIZE, where=str(i), detail="x") for i in range(min(count, KEPT))]

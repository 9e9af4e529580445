"""What no verdict can see: wrong states under the right ids are stored, and found by recomputing them."""

from __future__ import annotations

from pathlib import Path

import pytest

from headrace_cli.verify import verify
from tests.support.commands import headrace
from tests.support.faults import hits_of, write_plan
from tests.support.pipeline import (
    assert_nothing_left,
    make_stack,
    running,
    submit,
    wait_finished,
    write_run_file,
    write_samples,
)

pytestmark = pytest.mark.pipeline


def test_verify_names_the_rows_that_hold_other_states_and_no_other_row(tmp_path: Path, tiny: Path) -> None:
    wrong = {"other_states": [3, 17], "swapped_boundaries": [5, 20]}
    plan = write_plan(
        tmp_path / "plan.toml", *({"kind": kind, "ordinals": ordinals} for kind, ordinals in wrong.items())
    )
    stack = make_stack(tmp_path / "stack", tiny, engine=("--faults", str(plan)))
    data = write_samples(tmp_path / "data.jsonl", 30)
    with running(stack) as bus:
        submit(bus, write_run_file(tmp_path, data, tiny))
        view = wait_finished(bus, "test")
        assert_nothing_left(stack, bus, "test")
    assert (view.stored, view.mismatches, view.failed) == (30, 0, 0), "every verdict was a match"
    assert len(hits_of(plan)) == 4
    report = verify(
        tmp_path / "dataset", model=tiny, sample=0, all_rows=True, semantic=False, tolerance=None, progress=None
    )
    assert {problem.ordinal for problem in report.problems} == {3, 5, 17, 20}
    assert headrace("verify", tmp_path / "dataset", "--all", "--model", tiny).returncode == 5

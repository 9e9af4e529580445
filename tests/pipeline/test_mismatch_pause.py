"""A run whose engine computes other tokens than were sent: it pauses by itself, says why, and goes on when resumed."""

from __future__ import annotations

from pathlib import Path

import pytest

from headrace.bus.values import RunView
from tests.support.commands import headrace
from tests.support.faults import hits_of, write_plan
from tests.support.pipeline import (
    assert_nothing_left,
    assert_right,
    make_stack,
    running,
    stopped,
    submit,
    wait_finished,
    write_run_file,
    write_samples,
)
from tests.support.waiting import wait_until

pytestmark = pytest.mark.pipeline

WRONG = [10, 11, 12]
SAMPLES = 120
LIMIT = {
    # Three mismatches pass this limit, however many matches the reaper sees beside them.
    "HEADRACE_MISMATCH_LIMIT": "0.0025",
    "HEADRACE_MISMATCH_VERDICTS": "1000",
    # While the writer is stopped, the dump folder has no room for all samples: some wait until the reaper has looked.
    "HEADRACE_DUMP_CAP_BYTES": str(3 << 20),
}


def test_a_run_with_too_many_mismatches_pauses_by_itself_and_ends_right_when_resumed(
    tmp_path: Path, tiny: Path
) -> None:
    plan = write_plan(tmp_path / "plan.toml", {"kind": "other_tokens", "ordinals": WRONG, "times": 1})
    stack = make_stack(tmp_path / "stack", tiny, engine=("--faults", str(plan)), environ=LIMIT)
    data = write_samples(tmp_path / "data.jsonl", SAMPLES, seed=8)
    with running(stack) as bus:
        password = stack.folder / "redis-password"
        environ = {"HEADRACE_REDIS_URL": stack.redis_url, "HEADRACE_REDIS_PASSWORD_FILE": str(password)}
        with stopped(stack, "writer"):
            submit(bus, write_run_file(tmp_path, data, tiny))

            def resting() -> RunView | None:
                view = bus.runs.get("test")
                return view if view is not None and view.state == "paused" and view.in_flight == 0 else None

            view = wait_until(resting, 120, "the run to pause and what was in flight to end")
        assert view.pending > 0
        assert view.reason.startswith("mismatch rate ")
        assert view.reason.endswith(" samples' first attempts (token_content 3), limit 0.25 % of at least 1000")
        followed = headrace("status", "test", "--wait", **environ)
        assert followed.returncode == 4
        assert view.reason in followed.stderr
        assert view.reason in headrace("status", "test", COLUMNS="400", **environ).stdout

        assert headrace("resume", "test", **environ).returncode == 0
        view = wait_finished(bus, "test")
        assert (view.mismatches, view.reasons) == (3, {"token_content": 3})
        assert len(hits_of(plan)) == 3
        assert_nothing_left(stack, bus, "test")
    assert_right(view, tmp_path / "dataset", tiny)

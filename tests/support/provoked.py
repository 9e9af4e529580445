"""A stack whose engine follows a fault plan with a fault for each run, and what its services count of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from headrace.bus import Bus
from headrace.bus.values import RunView
from headrace.manifest import Line
from headrace_cli.stack import Stack
from headrace_cli.verify import verify
from tests.support.faults import Fault, hits_of, write_plan
from tests.support.pipeline import (
    assert_nothing_left,
    lines_of,
    make_stack,
    metric,
    running,
    submit,
    wait_finished,
    write_run_file,
    write_samples,
)
from tests.support.waiting import wait_until

ENVIRON = {
    # With four in flight, a sample from the fifth on is sent when another one was captured: the run has an identity.
    "HEADRACE_MAX_REQUESTS": "4",
    "HEADRACE_MISMATCH_LIMIT": "1",  # never: the plan's mismatches must not pause a run
    "HEADRACE_SITE_TTL_SECONDS": "60",  # a service that stands still keeps its place
    "HEADRACE_ENGINE_TIMEOUT_SECONDS": "6",
    "HEADRACE_DRAIN_SECONDS": "1",
    "HEADRACE_LEASE_GRACE_SECONDS": "8",
    "HEADRACE_CAPTURE_DEADLINE_SECONDS": "3",
}
TIMEOUT, GRACE = 6.0, 8.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Provoked:
    """The running stack; each run has samples, a run file and an output of its own."""

    stack: Stack
    bus: Bus
    folder: Path
    model: Path
    plan: Path

    def submit(self, run: str, samples: int = 8, **changes: str | int) -> None:
        """Submit a run of prompts that are longer than a step's budget."""
        data = write_samples(self.folder / f"{run}.jsonl", samples, shortest=140, longest=200)
        submit(self.bus, write_run_file(self.folder, data, self.model, name=run, output=self.output(run), **changes))

    def output(self, run: str) -> str:
        """The run's dataset."""
        return str(self.folder / run)

    def lines(self, run: str) -> list[Line]:
        """Its manifest."""
        return lines_of(Path(self.output(run)))

    def finish(self, run: str) -> RunView:
        """Wait for its end: nothing is left, and every row holds the states that the model has."""
        view = wait_finished(self.bus, run)
        assert_nothing_left(self.stack, self.bus, run)
        output = Path(self.output(run))
        report = verify(
            output, model=self.model, sample=0, all_rows=True, semantic=False, tolerance=None, progress=None
        )
        assert report.ok, report.problems[:5]
        assert len(list((output / "rows").rglob("*.safetensors"))) == view.stored
        assert sorted(line.ordinal for line in self.lines(run)) == list(range(view.spec.total))
        return view

    def hits(self, run: str) -> int:
        """How often the plan hit the run's requests until now."""
        return sum(hit["request"].startswith(f"hr-{run}-") for hit in hits_of(self.plan))

    def burnt(self, run: str) -> list[str]:
        """Why attempts were burnt."""
        return sorted(reason for *_, reason in self.bus.runs.dead(run))

    @contextmanager
    def counting(self, service: str, name: str, **labels: str) -> Iterator[Callable[[float], None]]:
        """Yield what waits until a counter went up by a number since; a service counts after it told Redis."""
        before = metric(self.stack, service, name, **labels)

        def counted(number: float) -> None:
            def reached() -> bool:
                return metric(self.stack, service, name, **labels) - before >= number

            wait_until(reached, 30, f"{name}{labels} to go up by {number:g}")
            assert metric(self.stack, service, name, **labels) - before == number

        yield counted


@contextmanager
def provoked(folder: Path, model: Path, *faults: Fault) -> Iterator[Provoked]:
    """Run a stack whose engine follows this plan."""
    plan = write_plan(folder / "plan.toml", *faults)
    stack = make_stack(folder / "stack", model, engine=("--faults", str(plan)), environ=ENVIRON)
    with running(stack) as bus:
        yield Provoked(stack=stack, bus=bus, folder=folder, model=model, plan=plan)

"""Every reason by which an attempt ends, provoked once: counted, survived, and burnt exactly where it must be."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from headrace.reasons import LOSSES, Reason
from tests.pipeline import test_leases
from tests.support.pipeline import READY_SECONDS, metric, stopped, wait_reason
from tests.support.provoked import GRACE, TIMEOUT, Provoked, provoked
from tests.support.waiting import wait_until

pytestmark = pytest.mark.pipeline

ONCE, AGAIN = (4, 5), 7  # samples that one attempt of goes wrong, and the one that goes wrong again and again
SAMPLES, MAX_ATTEMPTS = 8, 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A kind of fault, the reason that it leads to, and who counts it as what.

    Where it `burns`, the sample that is hit again and again fails with the reason; where not, it outlasts more hits
    than it has attempts. Without `lasting` there is no such sample.
    """

    kind: str
    reason: str
    service: str = "watcher"
    metric: str = "headrace_match_failures_total"
    outcome: str = ""
    burns: bool = True
    lasting: bool = True

    @property
    def run(self) -> str:
        return self.kind.replace("_", "")

    @property
    def labels(self) -> dict[str, str]:
        if self.outcome:
            return {"run": self.run, "outcome": self.outcome}
        if self.reason in LOSSES:
            return {"reason": self.reason}
        return {"run": self.run, "reason": self.reason}

    @property
    def hits(self) -> int:
        """How often it hits in all."""
        return len(ONCE) + (MAX_ATTEMPTS if self.lasting else 0)


def answer(kind: str, reason: str, outcome: str, *, burns: bool = True) -> Case:
    """What the dispatcher sees."""
    metric = "headrace_requests_total"
    return Case(kind=kind, reason=reason, service="dispatcher", metric=metric, outcome=outcome, burns=burns)


def loss(kind: str, reason: str, *, burns: bool = True) -> Case:
    """What the capture core says."""
    return Case(kind=kind, reason=reason, metric="headrace_losses_total", burns=burns)


CASES = (
    Case(kind="other_tokens", reason=Reason.TOKEN_CONTENT),
    Case(kind="short", reason=Reason.TOKEN_COUNT),
    Case(kind="other_boundaries", reason=Reason.LAYERS),
    Case(kind="other_shape", reason=Reason.SHAPE),
    Case(kind="nan", reason=Reason.NOT_FINITE),
    Case(kind="zero_row", reason=Reason.DEGENERATE),
    Case(kind="other_weights", reason=Reason.WEIGHTS_CHANGED),
    Case(kind="other_engine", reason=Reason.ENGINE_CHANGED),
    Case(kind="prefix_hit", reason=Reason.PREFIX_CACHED),
    Case(kind="lost_part", reason=Reason.INCOMPLETE),
    Case(kind="weights_mid_prompt", reason=Reason.INCOMPLETE),
    Case(kind="torn", reason=Reason.UNREADABLE),
    Case(kind="flipped", reason=Reason.CORRUPT, service="writer"),
    loss("no_memory", Reason.NO_ROOM, burns=False),
    loss("evicted", Reason.EVICTED),
    loss("abort", Reason.ABORTED),
    loss("capture_fault", Reason.INTERNAL),
    answer("unavailable", "http_503", "unavailable", burns=False),
    answer("bad_answer", "bad_answer", "refused"),
    Case(kind="withheld", reason="no_dump", service="dispatcher", metric="headrace_lapses_total", lasting=False),
)


def faults() -> list[dict[str, str | int | float | list[int]]]:
    """The plan: a run for each case, and those of the tests below."""
    plan: list[dict[str, str | int | float | list[int]]] = []
    for case in CASES:
        plan.append({"kind": case.kind, "run": case.run, "ordinals": list(ONCE)})
        if case.lasting:
            times = 1000 if case.burns else MAX_ATTEMPTS
            plan.append({"kind": case.kind, "run": case.run, "ordinals": [AGAIN], "times": times})
    return [
        *plan,
        {"kind": "unknown_run", "run": "unknownrun", "ordinals": [1]},
        {"kind": "too_long", "run": "toolong", "ordinals": [0]},
        {"kind": "hang", "run": "timeout", "seconds": TIMEOUT + 2},
        {"kind": "hang", "run": "drained", "seconds": TIMEOUT - 1},
        {"kind": "crash", "run": "crash", "ordinals": [5]},
        {"kind": "late", "run": "late", "seconds": GRACE + 6},  # long after the first attempt lapsed
    ]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory, tiny: Path) -> Iterator[Provoked]:
    with provoked(tmp_path_factory.mktemp("reasons"), tiny, *faults()) as running:
        yield running


@pytest.mark.parametrize("case", CASES, ids=[case.kind for case in CASES])
def test_a_fault_is_counted_by_its_reason_and_survived(case: Case, place: Provoked) -> None:
    with place.counting(case.service, case.metric, **case.labels) as counted:
        place.submit(case.run, SAMPLES, max_attempts=MAX_ATTEMPTS if case.burns else 1)
        view = place.finish(case.run)
        counted(case.hits)
    assert place.hits(case.run) == case.hits
    assert view.reasons == {case.reason: case.hits}
    mismatch = case.metric == "headrace_match_failures_total"
    assert view.mismatches == (case.hits if mismatch else 0)
    assert place.burnt(case.run) == ([case.reason] * case.hits if case.burns else [])
    failed = {(line.ordinal, line.reason) for line in place.lines(case.run) if line.status == "failed"}
    assert failed == ({(AGAIN, case.reason)} if case.burns and case.lasting else set())
    assert view.failed_by == {reason: 1 for _, reason in failed}
    assert view.stored == SAMPLES - len(failed)


def test_a_dump_of_a_run_that_nobody_submitted_is_refused(place: Provoked) -> None:
    before = set(place.stack.folder.glob("quarantine/**/hr-ghost-*"))
    place.submit("unknownrun", 3, max_attempts=2)
    view = place.finish("unknownrun")
    assert (view.stored, view.reasons) == (3, {"no_dump": 1})
    refused = {"run": "ghost", "reason": Reason.UNKNOWN_RUN}
    assert metric(place.stack, "watcher", "headrace_match_failures_total", **refused) == 1
    assert set(place.stack.folder.glob("quarantine/**/hr-ghost-*")) - before
    assert place.bus.runs.get("ghost") is None


def test_a_refused_prompt_is_an_http_400(place: Provoked) -> None:
    with (
        place.counting("dispatcher", "headrace_requests_total", run="toolong", outcome="refused") as counted,
        # SGLang runs one stub row of such a prompt: here it is told after the answer.
        stopped(place.stack, "watcher"),
    ):
        place.submit("toolong", 1, max_attempts=1)
        wait_reason(place.bus, "toolong", "http_400", 1)
        counted(1)
    view = place.finish("toolong")
    assert (view.failed_by, place.burnt("toolong")) == ({"http_400": 1}, ["http_400"])
    (line,) = place.lines("toolong")
    assert (line.status, line.reason) == ("failed", "http_400")


def test_an_engine_that_hangs_is_a_timeout(place: Provoked) -> None:
    with (
        place.counting("dispatcher", "headrace_requests_total", run="timeout", outcome="timeout") as counted,
        stopped(place.stack, "watcher"),  # the hang ends, and its dump would win if it were seen before the timeout
    ):
        place.submit("timeout", 1, max_attempts=2)
        wait_reason(place.bus, "timeout", "timeout", 1)
        counted(1)
    view = place.finish("timeout")
    assert (view.stored, view.reasons["timeout"], place.burnt("timeout")) == (1, 1, ["timeout"])
    assert set(view.reasons) <= {"timeout", "duplicate"}, "the hung request's dump may come as well"


def test_an_engine_that_dies_burns_nothing(place: Provoked) -> None:
    place.submit("crash", 8, max_attempts=1)
    wait_until(lambda: place.hits("crash") == 1, 30, "the crash")
    place.stack.kill("engine")  # what is left of it
    wait_reason(place.bus, "crash", "connection", 1)
    place.stack.start("engine")
    view = place.finish("crash")
    assert (view.stored, place.burnt("crash")) == (8, [])
    assert set(view.reasons) <= {"connection", "http_503", "duplicate"}
    # Of a request whose dump was captured, the answer that broke off counts as a request and ends no attempt.
    unavailable = view.reasons["connection"] + view.reasons.get("http_503", 0)
    labels = {"run": "crash", "outcome": "unavailable"}
    assert metric(place.stack, "dispatcher", "headrace_requests_total", **labels) >= unavailable
    place.stack.wait_ready("watcher", READY_SECONDS)


def test_a_dispatcher_that_is_stopped_burns_nothing(place: Provoked) -> None:
    place.submit("drained", 1, max_attempts=1)
    wait_until(lambda: place.hits("drained") == 1, 30, "the hang")
    assert place.stack.stop_one("dispatcher") == 0
    view = place.bus.runs.get("drained")
    assert view is not None
    assert (view.reasons, view.in_flight) == ({"dispatcher_stopped": 1}, 0)
    place.stack.start("dispatcher")
    place.stack.wait_ready("dispatcher", READY_SECONDS)
    view = place.finish("drained")
    assert (view.stored, place.burnt("drained")) == (1, [])


def test_the_second_dump_of_a_sample_is_a_duplicate(place: Provoked) -> None:
    with place.counting("watcher", "headrace_duplicates_total", run="late") as counted:
        place.submit("late", 1, max_attempts=2)
        with stopped(place.stack, "writer"):
            wait_reason(place.bus, "late", "duplicate", 1)
            counted(1)
        view = place.finish("late")
    assert (view.stored, view.reasons, view.mismatches) == (1, {"duplicate": 1, "no_dump": 1}, 0)
    assert place.burnt("late") == ["no_dump"]


# Reasons that are none of a dump or of the capture core, as the README has them; `http_` stands for any status.
OTHERS = {
    "timeout",
    "connection",
    "http_400",
    "http_503",
    "bad_answer",
    "dispatcher_stopped",
    "no_dump",
    "lapsed",
    "dump_gone",
}
ALONE = {
    Reason.UNKNOWN_RUN: test_a_dump_of_a_run_that_nobody_submitted_is_refused,
    Reason.DUPLICATE: test_the_second_dump_of_a_sample_is_a_duplicate,
    "http_400": test_a_refused_prompt_is_an_http_400,
    "timeout": test_an_engine_that_hangs_is_a_timeout,
    "connection": test_an_engine_that_dies_burns_nothing,
    "dispatcher_stopped": test_a_dispatcher_that_is_stopped_burns_nothing,
    "lapsed": test_leases.test_requests_of_a_dispatcher_that_died_lapse_and_are_sent_again,
    "dump_gone": test_leases.test_a_captured_sample_whose_dump_is_gone_is_extracted_again,
}


def test_every_reason_is_provoked_by_a_test() -> None:
    assert {case.reason for case in CASES} | set(ALONE) == set(Reason) | OTHERS

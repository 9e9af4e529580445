"""Each fault between model and capture, against the real capture core: what becomes of the request, and of others."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from threading import Event

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open

from headrace.dumpfolder import read_dump
from headrace.dumps import PRE_NORM, DumpHeader
from headrace.reasons import Reason
from headrace.runs import Identity
from headrace.verdicts import Match, Requirement, judge
from headrace_capture.core import Capture
from headrace_capture.forward import Forward, Piece
from headrace_engine.faults.forwards import Forwards
from headrace_engine.faults.log import Hits
from tests.support.capture import (
    BOUNDARIES,
    HIDDEN,
    WEIGHTS,
    Prompt,
    assert_published,
    dump_path,
    forward_of,
    leftovers,
    lost,
    prompt,
)
from tests.support.faults import write_plan

HIT, TOKENS = 2, 20  # the request that goes wrong, among five
BUDGETS = (100, 33, 7, 3)  # tokens of a step: all in one; split between; in many parts; in the smallest
BOOT = "boot"


def prompts() -> list[Prompt]:
    return [prompt(tokens, ordinal=ordinal) for ordinal, tokens in enumerate((9, 16, TOKENS, 12, 5))]


def steps(wanted: Sequence[Prompt], budget: int) -> Iterator[list[tuple[Prompt, int, int]]]:
    """Prompts one after the other, cut where a step's budget ends."""
    step: list[tuple[Prompt, int, int]] = []
    left = budget
    for one in wanted:
        begin = 0
        while begin < one.tokens:
            end = min(one.tokens, begin + left)
            step.append((one, begin, end))
            left -= end - begin
            begin = end
            if not left:
                yield step
                step, left = [], budget
    if step:
        yield step


def no_withdrawal(rid: str) -> None:
    raise AssertionError(f"{rid} was withdrawn")


class Faulty:
    """A capture that gets what the faults make of forwards."""

    def __init__(self, capture: Capture, hits: Hits) -> None:
        self.capture = capture
        self.hits = hits
        self.forwards = Forwards(hits, Event())
        self.dropped: dict[str, str] = {}
        self.withdrawn: list[str] = []

    def run(self, wanted: Sequence[Prompt], budget: int) -> None:
        for one in wanted:
            self.hits.choose(one.rid, BOOT)
        for step in steps(wanted, budget):
            self.step(forward_of(step))
        assert self.capture.flush(10)

    def step(self, forward: Forward) -> None:
        for part in self.forwards.of(forward, self.withdrawn.append):
            self.dropped |= self.capture.forward(part)


def faulty(capture: Capture, folder: Path, kind: str) -> Faulty:
    plan = write_plan(folder.parent / "plan.toml", {"kind": kind, "ordinals": [HIT]})
    return Faulty(capture, Hits(plan))


def verdict(folder: Path, wanted: Prompt) -> tuple[Reason | None, DumpHeader]:
    """The judge's reason, None for a match; the run's first row came from this engine and these weights."""
    dump = read_dump(dump_path(folder, wanted))
    identity = Identity(engine=dump.header.engine, weight_version=WEIGHTS)
    required = Requirement(boundaries=BOUNDARIES, final_state=PRE_NORM, hidden_size=HIDDEN, identity=identity)
    decision = judge(dump, wanted.request, required)
    return (None if isinstance(decision, Match) else decision.reason), dump.header


def states(folder: Path, wanted: Prompt) -> tuple[torch.Tensor, torch.Tensor]:
    with safe_open(dump_path(folder, wanted), framework="pt") as tensors:
        return tensors.get_tensor("aux"), tensors.get_tensor("final")


def assert_others_are_well(folder: Path, wanted: Sequence[Prompt]) -> None:
    for one in wanted:
        if one.request.ordinal != HIT:
            assert_published(folder, one)
    assert leftovers(folder) == []


@pytest.mark.parametrize("budget", BUDGETS)
@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("prefix_hit", Reason.PREFIX_CACHED),
        ("lost_part", Reason.INCOMPLETE),
        ("weights_mid_prompt", Reason.INCOMPLETE),
        ("evicted", Reason.EVICTED),
        ("no_memory", Reason.NO_ROOM),
        ("capture_fault", Reason.INTERNAL),
    ],
)
def test_a_lost_request_leaves_its_reason_and_harms_no_other(
    capture: Capture, folder: Path, kind: str, reason: Reason, budget: int
) -> None:
    at_work, wanted = faulty(capture, folder, kind), prompts()
    at_work.run(wanted, budget)
    assert lost(folder, wanted[HIT]).reason == reason
    assert at_work.dropped == {wanted[HIT].rid: f"dropped:{reason}"}
    assert_others_are_well(folder, wanted)


@pytest.mark.parametrize("budget", BUDGETS)
@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("other_tokens", Reason.TOKEN_CONTENT),
        ("nan", Reason.NOT_FINITE),
        ("zero_row", Reason.DEGENERATE),
        ("other_weights", Reason.WEIGHTS_CHANGED),
    ],
)
def test_a_spoilt_dump_is_published_and_refused(
    capture: Capture, folder: Path, kind: str, reason: Reason, budget: int
) -> None:
    at_work, wanted = faulty(capture, folder, kind), prompts()
    at_work.run(wanted, budget)
    assert verdict(folder, wanted[HIT])[0] == reason
    assert at_work.dropped == {}
    assert_others_are_well(folder, wanted)


@pytest.mark.parametrize("budget", BUDGETS)
@pytest.mark.parametrize(("kind", "retractions"), [("repeated_part", 1), ("disordered_parts", 0)])
def test_parts_that_repeat_or_come_out_of_order_end_right(
    capture: Capture, folder: Path, kind: str, retractions: int, budget: int
) -> None:
    at_work, wanted = faulty(capture, folder, kind), prompts()
    at_work.run(wanted, budget)
    header = assert_published(folder, wanted[HIT])
    assert header.parts >= 3
    assert header.retractions == retractions
    assert_others_are_well(folder, wanted)


@pytest.mark.parametrize("budget", BUDGETS)
def test_states_of_another_request_pass_every_verdict(capture: Capture, folder: Path, budget: int) -> None:
    at_work, wanted = faulty(capture, folder, "other_states"), prompts()
    at_work.run(wanted, budget)
    assert verdict(folder, wanted[HIT])[0] is None
    aux, final = states(folder, wanted[HIT])
    known = {tuple(row.tolist()) for one in wanted if one is not wanted[HIT] for row in one.final}
    assert all(tuple(row.tolist()) in known for row in final)
    assert not torch.equal(aux, torch.cat(wanted[HIT].boundaries, dim=1))
    assert_others_are_well(folder, wanted)


@pytest.mark.parametrize("budget", BUDGETS)
def test_swapped_boundaries_pass_every_verdict(capture: Capture, folder: Path, budget: int) -> None:
    at_work, wanted = faulty(capture, folder, "swapped_boundaries"), prompts()
    at_work.run(wanted, budget)
    assert verdict(folder, wanted[HIT])[0] is None
    first, second, third = wanted[HIT].boundaries
    assert torch.equal(states(folder, wanted[HIT])[0], torch.cat([second, first, third], dim=1))
    assert_others_are_well(folder, wanted)


@pytest.mark.parametrize("budget", BUDGETS)
@pytest.mark.parametrize("kind", ["withheld", "escaping_id"])
def test_nothing_comes_of_rows_that_are_withheld_or_under_an_id_that_leaves_the_folder(
    capture: Capture, folder: Path, kind: str, budget: int
) -> None:
    at_work, wanted = faulty(capture, folder, kind), prompts()
    at_work.run(wanted, budget)
    assert not list(folder.parent.rglob(f"*{wanted[HIT].rid}*"))
    assert at_work.dropped == {}
    assert_others_are_well(folder, wanted)


def test_requests_that_wait_to_be_evicted_are_so_by_one_another(capture: Capture, folder: Path) -> None:
    at_work = Faulty(capture, Hits(write_plan(folder.parent / "plan.toml", {"kind": "evicted"})))
    wanted = prompts()
    at_work.run(wanted, 7)
    for one in wanted[:-1]:
        assert lost(folder, one).reason == Reason.EVICTED
    assert capture.counts().half_assembled == 1, "the last one waits for another"


def test_the_first_part_of_several_is_captured_before_an_abort(capture: Capture, folder: Path) -> None:
    at_work, wanted = faulty(capture, folder, "abort"), prompts()
    for one in wanted:
        at_work.hits.choose(one.rid, BOOT)
    at_work.step(forward_of([(wanted[HIT], 0, 7)]))
    assert at_work.withdrawn == [wanted[HIT].rid]
    assert capture.counts().half_assembled == 1


def test_a_hang_ends_with_the_engine(capture: Capture, folder: Path) -> None:
    plan = write_plan(folder.parent / "plan.toml", {"kind": "hang", "seconds": 3600})
    hits, stopping = Hits(plan), Event()
    stopping.set()
    one = prompt(TOKENS)
    hits.choose(one.rid, BOOT)
    for part in Forwards(hits, stopping).of(forward_of([(one, 0, TOKENS)]), no_withdrawal):
        capture.forward(part)
    assert capture.flush(10)
    assert_published(folder, one)


def test_rows_that_decode_travel_with_those_that_go_wrong(capture: Capture, folder: Path) -> None:
    at_work, wanted = faulty(capture, folder, "evicted"), prompts()
    hit, other = wanted[HIT], wanted[0]
    at_work.hits.choose(hit.rid, BOOT)
    at_work.step(forward_of([(hit, 0, TOKENS)], padding=3))
    at_work.step(forward_of([], decode=[hit], padding=2))
    at_work.step(forward_of([(other, 0, other.tokens)], decode=[hit]))
    assert capture.flush(10)
    assert lost(folder, hit).reason == Reason.EVICTED
    assert_published(folder, other)


def test_the_first_request_of_all_has_no_other_states_to_get(capture: Capture, folder: Path) -> None:
    at_work = faulty(capture, folder, "other_states")
    hit = prompts()[HIT]
    at_work.run([hit], 7)
    assert_published(folder, hit)


@given(
    tokens=st.lists(st.integers(1, 12), min_size=1, max_size=6),
    budget=st.integers(1, 15),
    hit=st.sets(st.integers(0, 5)),
    kind=st.sampled_from(["repeated_part", "disordered_parts", "swapped_boundaries", "nan", "other_tokens"]),
)
def test_whatever_is_hit_the_capture_gets_every_row_and_the_others_in_order(
    tmp_path_factory: pytest.TempPathFactory, tokens: list[int], budget: int, hit: set[int], kind: str
) -> None:
    plan = tmp_path_factory.mktemp("plan") / "plan.toml"
    hits = Hits(write_plan(plan, *([{"kind": kind, "ordinals": sorted(hit)}] if hit else [])))
    forwards = Forwards(hits, Event())
    wanted = [prompt(count, ordinal=ordinal) for ordinal, count in enumerate(tokens)]
    chosen = {one.rid for one in wanted if hits.choose(one.rid, BOOT)}
    well: list[Piece] = []
    rows: set[tuple[str, int]] = set()
    for step in steps(wanted, budget):
        for part in forwards.of(forward_of(step), no_withdrawal):
            counts = {sum(piece.rows for piece in part.pieces), len(part.token_ids), len(part.final)}
            assert len(counts) == 1
            assert len(part.pieces) == 1 or not chosen & {piece.rid for piece in part.pieces}
            well += [piece for piece in part.pieces if piece.rid not in chosen]
            rows |= {(piece.rid, piece.prefix + row) for piece in part.pieces for row in range(piece.rows)}
    assert rows == {(one.rid, row) for one in wanted for row in range(one.tokens)}
    pieces = [piece for step in steps(wanted, budget) for piece in forward_of(step).pieces]
    assert well == [piece for piece in pieces if piece.rid not in chosen]

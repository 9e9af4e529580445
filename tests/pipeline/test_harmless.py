"""Faults that end right by themselves: every sample is stored with its own states, and hardly an attempt is burnt."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from headrace.bus.values import RunView
from tests.support.faults import Fault
from tests.support.provoked import GRACE, Provoked, provoked

pytestmark = pytest.mark.pipeline

HIT = [2, 5]
SLOW = 3.0
KINDS = ("repeated_part", "disordered_parts", "slow", "cut", "duplicate_rid", "late", "escaping_id")
SECONDS = {"slow": SLOW, "late": GRACE + 6}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory, tiny: Path) -> Iterator[Provoked]:
    plan: list[Fault] = [
        {
            "kind": kind,
            "run": kind.replace("_", ""),
            "ordinals": HIT,
            **({"seconds": SECONDS[kind]} if kind in SECONDS else {}),
        }
        for kind in KINDS
    ]
    with provoked(tmp_path_factory.mktemp("harmless"), tiny, *plan) as running:
        yield running


def extract(place: Provoked, run: str, max_attempts: int = 1) -> RunView:
    """A run that the plan hits twice, to its end."""
    place.submit(run, 8, max_attempts=max_attempts)
    view = place.finish(run)
    assert place.hits(run) == 2
    assert (view.stored, view.mismatches) == (8, 0)
    return view


@pytest.mark.parametrize("run", ["repeatedpart", "disorderedparts", "slow"])
def test_what_a_scheduler_may_do_costs_nothing(run: str, place: Provoked) -> None:
    view = extract(place, run)
    assert (view.reasons, place.burnt(run)) == ({}, [])


def test_an_answer_that_is_cut_burns_nothing(place: Provoked) -> None:
    """Whether the dump was captured before its answer broke off, or not."""
    view = extract(place, "cut")
    assert set(view.reasons) <= {"connection", "duplicate"}
    assert place.burnt("cut") == []


def test_an_id_that_is_refused_as_in_flight_burns_an_attempt_unless_its_dump_is_there(place: Provoked) -> None:
    view = extract(place, "duplicaterid", max_attempts=2)
    assert set(view.reasons) <= {"http_400", "duplicate"}
    assert place.burnt("duplicaterid") == ["http_400"] * view.reasons.get("http_400", 0)


def test_a_dump_that_comes_after_its_grace_costs_an_attempt_and_does_no_harm(place: Provoked) -> None:
    view = extract(place, "late", max_attempts=2)
    assert place.burnt("late") == ["no_dump"] * 2
    assert {**view.reasons, "duplicate": 0} == {"no_dump": 2, "duplicate": 0}


def test_an_id_that_leads_out_of_the_folder_is_never_written_anywhere(place: Provoked) -> None:
    view = extract(place, "escapingid", max_attempts=2)
    assert (view.reasons, place.burnt("escapingid")) == ({"no_dump": 2}, ["no_dump"] * 2)
    assert list(place.folder.rglob("*hr-escapingid-*")) == []

"""A run goes on in a folder that was moved, and never in two folders."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from headrace.bus import Bus
from headrace.errors import Conflict, Unavailable
from headrace_dispatcher.rebuild import rebuild
from tests.support.dispatching import view_of, write_inputs, write_lines
from tests.support.stores import RUN, make_sample

pytestmark = pytest.mark.redis

SAMPLES = [make_sample(ordinal) for ordinal in range(4)]


@pytest.fixture
def output(tmp_path: Path) -> Path:
    return tmp_path / "dataset"


def test_a_moved_folder_goes_on_with_what_it_has(bus: Bus, output: Path, tmp_path: Path) -> None:
    spec = write_inputs(output, SAMPLES)
    write_lines(output, [0, 1, 1])
    assert rebuild(bus, spec) == 2
    moved = replace(spec, output=str(output.rename(tmp_path / "elsewhere")))
    write_lines(tmp_path / "elsewhere", [2])
    assert rebuild(bus, moved) == 1
    assert view_of(bus).spec.output == moved.output
    assert view_of(bus).stored == 3


@pytest.mark.parametrize("done", [2, 4])
def test_a_folder_that_lacks_lines_is_refused_and_changes_nothing(
    bus: Bus, output: Path, tmp_path: Path, done: int
) -> None:
    spec = write_inputs(output, SAMPLES)
    write_lines(output, list(range(done)))
    rebuild(bus, spec)
    assert view_of(bus).state == ("finished" if done == 4 else "active")
    fresh = replace(spec, output=str(tmp_path / "fresh"))
    write_inputs(tmp_path / "fresh", SAMPLES)
    write_lines(tmp_path / "fresh", [0, 0, 0, 0, 7])  # lines count by ordinal, and only those of the run
    with pytest.raises(Conflict) as caught:
        rebuild(bus, fresh)
    assert all(word in str(caught.value) for word in (RUN, spec.output, fresh.output, str(done)))
    assert view_of(bus).spec.output == spec.output


def test_a_folder_that_was_emptied_is_refused(bus: Bus, output: Path) -> None:
    spec = write_inputs(output, SAMPLES)
    write_lines(output, [0, 1])
    rebuild(bus, spec)
    (output / "manifest" / "a.jsonl").unlink()
    with pytest.raises(Conflict, match="restore"):
        rebuild(bus, spec)


def test_a_cancelled_run_is_not_taken_elsewhere_either(bus: Bus, output: Path, tmp_path: Path) -> None:
    spec = write_inputs(output, SAMPLES)
    write_lines(output, [0])
    rebuild(bus, spec)
    bus.runs.cancel(RUN)
    with pytest.raises(Conflict):
        rebuild(bus, replace(spec, output=str(tmp_path / "fresh")))
    assert view_of(bus).state == "cancelled"


def test_another_extraction_of_the_name_is_named_as_such(bus: Bus, output: Path, tmp_path: Path) -> None:
    spec = write_inputs(output, SAMPLES)
    write_lines(output, [0])
    rebuild(bus, spec)
    with pytest.raises(Conflict, match=r"another extraction.*final_state"):
        rebuild(bus, replace(spec, final_state="post_norm", output=str(tmp_path / "fresh")))


def test_a_manifest_that_cannot_be_read_is_unavailable(bus: Bus, output: Path) -> None:
    spec = write_inputs(output, SAMPLES)
    (output / "manifest" / "a.jsonl").mkdir(parents=True)
    with pytest.raises(Unavailable, match=r"a\.jsonl"):
        rebuild(bus, spec)

"""The oracle of the chaos run is no use unless it sees what is wrong."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from bench.chaos.checks import Check, in_folder, recomputed, verified
from tests.support.datasets import (
    LENGTHS,
    build,
    compute_states,
    edit_line,
    edit_lines,
    line_of,
    mask_of,
    row_path,
    segment,
)
from tests.support.tiny_models import tiny_llama

TOTAL = len(LENGTHS)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def pristine(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A sound dataset, with its samples beside it."""
    states = compute_states(model)
    output = build(tmp_path_factory.mktemp("pristine"), model, states)
    samples = [json.dumps({"input_ids": ids, "loss_mask": mask_of(ids)}) for ids in states.token_ids]
    (output.parent / "samples.jsonl").write_text("\n".join(samples) + "\n")
    return output


@pytest.fixture
def dataset(pristine: Path, tmp_path: Path) -> Path:
    shutil.copy(pristine.parent / "samples.jsonl", tmp_path)
    return Path(shutil.copytree(pristine, tmp_path / "dataset"))


def found(checks: Sequence[Check]) -> dict[str, int]:
    return {check.what: check.found for check in checks if check.found}


def wrong_rows(dataset: Path, model: Path) -> tuple[str, ...]:
    return recomputed(dataset, dataset.parent / "samples.jsonl", model).examples


def change_row(dataset: Path, name: str, row: int, add: float) -> None:
    path = row_path(dataset, 3)
    tensors = load_file(path)
    tensors[name][row] += add
    save_file(tensors, path)


def test_a_sound_dataset_has_nothing_that_must_not_be_there(dataset: Path, model: Path) -> None:
    assert found(in_folder(dataset, TOTAL)) == {}
    assert wrong_rows(dataset, model) == ()
    assert verified(dataset).found == 0


@pytest.mark.parametrize("name", ["checksum", "bytes", "request", "tokens"])
def test_a_line_that_says_of_its_row_what_is_not_so_is_found(dataset: Path, name: str) -> None:
    edit_line(dataset, 3, **{name: getattr(line_of(dataset, 4), name)})
    assert found(in_folder(dataset, TOTAL)) == {}
    assert verified(dataset).found > 0


def test_a_sample_without_a_stored_line_is_lost_and_its_row_is_one_too_many(dataset: Path) -> None:
    edit_lines(dataset, lambda lines: [line for line in lines if line["ordinal"] != 2])
    assert found(in_folder(dataset, TOTAL)) == {
        "samples lost: without a stored line": 1,
        "samples duplicated: rows without a line": 1,
    }


def test_a_line_without_its_row_is_a_lost_sample(dataset: Path) -> None:
    row_path(dataset, 2).unlink()
    assert found(in_folder(dataset, TOTAL)) == {"samples lost: with a line and without its row": 1}


def test_a_second_stored_line_is_a_duplicate(dataset: Path) -> None:
    edit_lines(dataset, lambda lines: [*lines, lines[0]])
    assert found(in_folder(dataset, TOTAL)) == {"samples duplicated: with another stored line": 1}


def test_what_writers_should_have_removed_is_found(dataset: Path) -> None:
    (dataset / ".tmp" / "w1").mkdir(parents=True)
    (dataset / ".tmp" / "w1" / "1-row").write_text("half")
    (dataset / ".quarantine").mkdir()
    (dataset / ".quarantine" / "row").write_text("wrong")
    with segment(dataset).open("ab") as file:
        file.write(b"no line\n")
    assert found(in_folder(dataset, TOTAL)) == {"temporary files": 2, "rows put away as wrong": 1, "damaged lines": 1}


@pytest.mark.parametrize("name", ["aux", "final"])
def test_states_of_one_token_that_are_a_little_off_make_a_row_wrong(dataset: Path, model: Path, name: str) -> None:
    change_row(dataset, name, 1, 0.01)
    assert wrong_rows(dataset, model) == (row_path(dataset, 3).name,)


@pytest.mark.parametrize("name", ["token_ids", "loss_mask"])
def test_another_token_or_mask_makes_a_row_wrong(dataset: Path, model: Path, name: str) -> None:
    change_row(dataset, name, 0, 1)
    assert wrong_rows(dataset, model) == (row_path(dataset, 3).name,)


def test_rows_that_changed_places_are_both_wrong(dataset: Path, model: Path) -> None:
    one, other = row_path(dataset, 1), row_path(dataset, 2)  # of one length
    one.rename(dataset / "one")
    other.rename(one)
    (dataset / "one").rename(other)
    assert wrong_rows(dataset, model) == (one.name, other.name)


def test_a_row_that_cannot_be_read_is_wrong(dataset: Path, model: Path) -> None:
    path = row_path(dataset, 3)
    path.write_bytes(path.read_bytes()[:-8])
    (wrong,) = wrong_rows(dataset, model)
    assert wrong.startswith(path.name)

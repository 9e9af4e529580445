"""Rows in format `specforge`, loaded by SpecForge's own classes: every row, bit for bit, and nothing else."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM

from headrace_writer import formats
from headrace_writer.formats.base import States
from tests.support.datasets import LENGTHS, Recipe, as_stored, build, compute_states, mask_of, norm_of
from tests.support.pipeline import (
    assert_right,
    make_stack,
    running,
    submit,
    wait_finished,
    write_run_file,
    write_samples,
)
from tests.support.tiny_models import tiny_llama
from tests.support.trainers import environment

# The first run installs more than a gigabyte.
pytestmark = [pytest.mark.formats, pytest.mark.timeout(1800)]

PINS = ("torch==2.13.0", "transformers==5.8.1", "datasets==5.1.0")
BARE = ("specforge==0.2.0",)
FORM = formats.get("specforge")
DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """What SpecForge gave: tensors by `{file name}/{key}`, its list of files, and how many its reader refers to."""

    tensors: Mapping[str, torch.Tensor]
    paths: list[Path]
    references: int


@pytest.fixture(scope="session")
def python() -> Path:
    """An interpreter beside SpecForge's classes."""
    return environment("specforge", PINS, BARE)


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("model"))


def load(python: Path, dataset: Path, output: Path) -> Loaded:
    """Load a dataset with SpecForge's classes, in their own interpreter."""
    script = Path(__file__).with_name("load_specforge.py")
    command = [str(python), str(script), str(dataset), str(output)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    # Their dataset says so and gives the first row instead of one that it cannot read.
    assert "ERROR" not in done.stdout, done.stdout
    with safe_open(output, "pt") as file:
        tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 - no mapping
        metadata = file.metadata()
    paths = [Path(path).relative_to(dataset) for path in json.loads(metadata["paths"])]
    return Loaded(tensors=tensors, paths=paths, references=int(metadata["references"]))


def tensor(states: States) -> torch.Tensor:
    """States as they lie in a row, [1, N, width]."""
    flat = torch.frombuffer(bytearray(states.buffer), dtype=DTYPES[states.info.dtype])
    return flat.reshape(1, *states.info.shape)


def assert_given(loaded: Loaded, ordinal: int, token_ids: list[int], mask: list[int]) -> dict[str, torch.Tensor]:
    """A row's ids and mask are the sample's, as SpecForge uses them: it trains no last token. Gives all its tensors."""
    name = FORM.path(ordinal).name
    row = {key.partition("/")[2]: value for key, value in loaded.tensors.items() if key.startswith(f"{name}/")}
    assert sorted(row) == ["attention_mask", "hidden_state", "input_ids", "loss_mask", "target"]
    assert row["input_ids"].tolist() == [token_ids]
    assert row["loss_mask"].tolist() == [[*mask[:-1], 0]]
    assert row["attention_mask"].tolist() == [[1] * len(token_ids)]
    return row


def assert_same(found: torch.Tensor, expected: torch.Tensor) -> None:
    assert found.dtype == expected.dtype
    assert torch.equal(found, expected)


def test_specforge_loads_every_row_of_a_run(tmp_path: Path, python: Path, model: Path) -> None:
    data = write_samples(tmp_path / "data.jsonl", 24, seed=21)
    output = tmp_path / "dataset"
    with running(make_stack(tmp_path / "stack", model)) as bus:
        submit(bus, write_run_file(tmp_path, data, model, format="specforge"))
        view = wait_finished(bus, "test")
    assert_right(view, output, model)
    loaded = load(python, output, tmp_path / "loaded.safetensors")
    assert sorted(loaded.paths) == sorted(Path(FORM.path(ordinal)) for ordinal in range(24))
    assert loaded.references == 24
    for ordinal, line in enumerate(data.read_text().splitlines()):
        sample = json.loads(line)
        given = assert_given(loaded, ordinal, sample["input_ids"], sample["loss_mask"])
        row = FORM.read(output / FORM.path(ordinal))
        assert_same(given["hidden_state"], tensor(row.aux))
        assert_same(given["target"], tensor(row.final))


@pytest.mark.parametrize("dtype", ["F32", "BF16"])
@pytest.mark.parametrize("captured", ["pre_norm", "post_norm"])
def test_the_target_is_what_the_models_own_norm_gives(
    tmp_path: Path, python: Path, model: Path, dtype: str, captured: str
) -> None:
    states = compute_states(model)
    recipe = Recipe(dtype=dtype, final_state=captured, norm=norm_of(model, dtype), spec={"format": "specforge"})
    output = build(tmp_path, model, states, recipe)
    # What a writer that was killed left, and a row that was refused: SpecForge looks everywhere for its suffix.
    for place in (".tmp/w/1-data_9.ckpt.part", ".quarantine/w-1-data_9.ckpt.bad"):
        (output / place).parent.mkdir(exist_ok=True)
        (output / place).write_bytes(b"no row")
    loaded = load(python, output, tmp_path / "loaded.safetensors")
    assert [path.as_posix() for path in loaded.paths] == [str(FORM.path(ordinal)) for ordinal in range(len(LENGTHS))]
    norm = AutoModelForCausalLM.from_pretrained(model, dtype=DTYPES[dtype]).model.norm
    for ordinal, token_ids in enumerate(states.token_ids):
        given = assert_given(loaded, ordinal, list(token_ids), mask_of(token_ids))
        aux, final = (
            bits(as_stored(values[ordinal], dtype), dtype) for values in (states.aux, getattr(states, captured))
        )
        assert_same(given["hidden_state"], aux.reshape(1, len(token_ids), -1))
        with torch.inference_mode():
            assert_same(given["target"], norm(final[None]) if captured == "pre_norm" else final[None])
    assert_collated(loaded)


def bits(values: Any, dtype: str) -> torch.Tensor:
    return torch.from_numpy(values).view(DTYPES[dtype])


def assert_collated(loaded: Loaded) -> None:
    """The collator's batch is the rows in order, each followed by zeros up to the longest."""
    longest = max(LENGTHS)
    for key in ("input_ids", "attention_mask", "loss_mask", "hidden_state", "target"):
        batch = loaded.tensors[f"batch/{key}"]
        assert batch.shape[:2] == (len(LENGTHS), longest)
        for index, path in enumerate(loaded.paths):
            row = loaded.tensors[f"{path.name}/{key}"]
            assert_same(batch[index : index + 1, : row.shape[1]], row)
            assert not batch[index, row.shape[1] :].any()

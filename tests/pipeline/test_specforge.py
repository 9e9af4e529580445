"""A run in SpecForge's format, through the real processes: as torch loads it, as verify sees it, after kill -9."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from headrace.dumpfolder import read_norm
from headrace.finalnorm import NORM_FILE
from headrace_cli.verify import Kind
from headrace_writer import formats
from tests.support.datasets import norm_of
from tests.support.oracle import Oracle, agree
from tests.support.pipeline import (
    assert_nothing_left,
    assert_right,
    make_stack,
    running,
    stopped,
    submit,
    wait_finished,
    wait_stored,
    write_run_file,
    write_samples,
)
from tests.support.verified import check, only
from tests.support.waiting import wait_until

pytestmark = pytest.mark.pipeline

SAMPLES = 80
BOUNDARIES = (2, 4, 5)


def assert_torch_loads_the_models_states(output: Path, data: Path, model: Path) -> None:
    """Every line of `data` is a record whose states are those of a plain forward."""
    oracle = Oracle(model, BOUNDARIES)
    norm = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval().model.norm
    for ordinal, line in enumerate(data.read_text().splitlines()):
        sample = json.loads(line)
        record = torch.load(output / formats.get("specforge").path(ordinal), weights_only=True, mmap=True)
        states = oracle.states(sample["input_ids"])
        assert record["input_ids"].tolist() == sample["input_ids"]
        assert record["loss_mask"].tolist() == sample["loss_mask"]
        assert agree(record["aux_hidden_state"], states["aux"][None])
        with torch.inference_mode():
            assert agree(record["hidden_state"], norm(states["final"])[None])


def test_a_writer_killed_in_a_run_of_specforges_format_costs_no_row_and_stores_no_wrong_one(
    tmp_path: Path, tiny: Path
) -> None:
    data = write_samples(tmp_path / "data.jsonl", SAMPLES, seed=11)
    run_file = write_run_file(tmp_path, data, tiny, format="specforge")
    # The dump folder has no room for all samples: while the writer is stopped, some are left to be sent.
    stack = make_stack(tmp_path / "stack", tiny, environ={"HEADRACE_DUMP_CAP_BYTES": str(4 << 20)})
    output = tmp_path / "dataset"
    with running(stack) as bus:
        with stopped(stack, "writer"):
            submit(bus, run_file)
            (site,) = bus.sites.names()
            wait_until(lambda: bus.sites.storing(site)[0] >= 15, 60, "dumps to wait for the writer")
            bus.runs.pause("test", "until the writer is killed")
        assert 5 <= wait_stored(bus, "test", 5).stored < SAMPLES
        stack.kill("writer")
        stack.start("writer")
        bus.runs.activate("test")
        view = wait_finished(bus, "test")
        assert_nothing_left(stack, bus, "test")
    assert_right(view, output, tiny)
    assert_torch_loads_the_models_states(output, data, tiny)
    assert read_norm(output / NORM_FILE) == norm_of(tiny)
    # SpecForge takes every such file below the folder that it is given, whatever the folder's name.
    assert len(list(output.rglob("*.ckpt"))) == SAMPLES

    place = output / formats.get("specforge").path(7)
    damaged = bytearray(place.read_bytes())
    damaged[-1000] ^= 4
    place.write_bytes(damaged)
    problem = only(check(output))
    assert (problem.kind, problem.ordinal) == (Kind.CHECKSUM, 7)


def test_post_norm_that_was_captured_is_stored_as_it_is(tmp_path: Path, tiny: Path) -> None:
    data = write_samples(tmp_path / "data.jsonl", 8, seed=12)
    run_file = write_run_file(tmp_path, data, tiny, format="specforge", final_state="post_norm")
    with running(make_stack(tmp_path / "stack", tiny, engine=("--final-state", "post_norm"))) as bus:
        submit(bus, run_file)
        view = wait_finished(bus, "test")
    assert_right(view, tmp_path / "dataset", tiny)
    assert_torch_loads_the_models_states(tmp_path / "dataset", data, tiny)

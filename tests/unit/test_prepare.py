"""Preparing a run: inputs whole or absent, resumed only onto the same extraction, every bad input named."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from pathlib import Path

import pytest

from headrace.errors import Conflict, UsageError
from headrace.masks import decode_mask
from headrace_dispatcher.checkpoint import checkpoint_digest
from headrace_dispatcher.inputs import RejectedSample, Sample
from tests.support.checkpoints import CHATML_MARKED, HIDDEN_SIZE, small_checkpoint, vocab_size
from tests.support.prepared import chat, closed, fails, files, ready, run_file, write_data


def test_a_run_is_prepared_with_its_spec_and_every_sample(tmp_path: Path) -> None:
    write_data(tmp_path / "data.jsonl", chat("Why?", "Because.", "a"), ready(1, 2, 3), chat("q", "a", "a"))
    prepared, entries = closed(run_file(tmp_path, 'engine_model = "served"\nmax_attempts = 5\n'))
    spec = prepared.spec
    assert prepared.created
    assert prepared.rejected == Counter()
    assert (spec.run, spec.total, spec.model) == ("demo", 3, str(tmp_path / "model"))
    assert (spec.engine_model, spec.boundaries, spec.hidden_size) == ("served", (2, 6, 9), HIDDEN_SIZE)
    assert (spec.final_state, spec.format, spec.output) == ("pre_norm", "headrace", str(tmp_path / "out"))
    assert spec.max_attempts == 5
    assert prepared.inputs.spec == spec
    # Ids may repeat: the ordinal is the key.
    assert [entry.sample for entry in entries] == ["a", "1", "a"]
    assert entries[1] == Sample(ordinal=1, sample="1", ids=(1, 2, 3), mask=(1, 2))
    first = entries[0]
    assert isinstance(first, Sample)
    assert sum(decode_mask(first.mask)) < len(first.ids)


def test_every_sample_that_cannot_be_used_is_an_entry_with_its_reason(tmp_path: Path) -> None:
    write_data(
        tmp_path / "data.jsonl",
        {"text": "x"},
        {"input_ids": [1, 2], "loss_mask": [1]},
        ready(1, vocab_size(), name="v"),
        {"input_ids": [], "loss_mask": []},
        {"input_ids": [1, 2], "loss_mask": [0, 0]},
        ready(*[1] * 101),
        chat("word " * 99, "a"),
        {"messages": [{"role": "assistant", "content": "a"}]},
        {"messages": [{"role": "user", "content": "a"}]},
        {"input_ids": [True, 2], "loss_mask": [0, 1]},
        {"input_ids": [1.0, 2], "loss_mask": [0, 1]},
        {"input_ids": [1, 2], "loss_mask": [0, 3]},
        ready(1, 2),
    )
    prepared, entries = closed(run_file(tmp_path, "max_length = 100\n"))
    reasons = [entry.reason if isinstance(entry, RejectedSample) else "" for entry in entries]
    assert reasons == [
        "unknown_form",
        "mask_length",
        "vocabulary",
        "empty",
        "no_trained_tokens",
        "too_long",
        "too_long",
        "unrenderable",
        "no_trained_tokens",
        "unknown_form",
        "unknown_form",
        "unknown_form",
        "",
    ]
    assert all(entry.detail for entry in entries if isinstance(entry, RejectedSample))
    assert entries[2].sample == "v"
    assert prepared.rejected == Counter(filter(None, reasons))
    assert closed(tmp_path / "run.toml")[0].rejected == prepared.rejected


def test_a_run_without_one_usable_sample_is_refused_with_reasons_and_leaves_nothing(tmp_path: Path) -> None:
    write_data(tmp_path / "data.jsonl", ready(1, 2, 3), {"text": "x"}, {"input_ids": [1], "loss_mask": [0]})
    message = fails(UsageError, run_file(tmp_path), start=1)
    assert "not one of 2 samples can be used (no_trained_tokens 1, unknown_form 1)" in message
    assert "data.jsonl:2: unknown_form: neither input_ids" in message
    assert closed(tmp_path / "run.toml")[0].rejected.total() == 2


def test_a_checkpoint_that_moved_is_the_same_extraction_and_a_changed_one_is_not(tmp_path: Path) -> None:
    write_data(tmp_path / "data.jsonl", ready(1, 2))
    path = run_file(tmp_path)
    (tmp_path / "model" / "model.safetensors").write_bytes(b"weights")
    first = closed(path)[0]
    (tmp_path / "model").rename(tmp_path / "moved")
    path.write_text(path.read_text().replace('model = "model"', 'model = "moved"\nengine_model = "model"'))
    moved = closed(path)[0]
    assert (moved.created, moved.spec.model) == (False, str(tmp_path / "moved"))
    assert moved.spec.digest == first.spec.digest
    (tmp_path / "moved" / "model.safetensors").write_bytes(b"other weights")
    assert "another extraction (model_digest: " in fails(Conflict, path)


def test_markers_and_no_markers_make_the_same_inputs(tmp_path: Path) -> None:
    write_data(tmp_path / "data.jsonl", chat("q 😀", "你好 مرحبا\n\n"), chat("", ""))
    plain = closed(run_file(tmp_path))
    (tmp_path / "marked.jinja").write_text(CHATML_MARKED)
    path = run_file(tmp_path, 'chat_template = "marked.jinja"\n')
    path.write_text(path.read_text().replace('"out"', '"out2"'))
    marked = closed(path)
    assert plain[1] == marked[1]
    assert plain[0].spec.dataset != marked[0].spec.dataset


def test_a_second_call_uses_what_is_there_and_writes_nothing(tmp_path: Path) -> None:
    write_data(tmp_path / "data.jsonl", chat("q", "a"), {"text": "x"})
    path = run_file(tmp_path)
    first, entries = closed(path)
    before = files(tmp_path / "out")
    second, again = closed(path)
    assert (first.created, second.created) == (True, False)
    assert second.spec == first.spec
    assert second.rejected == first.rejected == Counter(unknown_form=1)
    assert again == entries
    assert files(tmp_path / "out") == before


def test_attempts_and_place_may_change_without_being_another_extraction(tmp_path: Path) -> None:
    write_data(tmp_path / "data.jsonl", chat("q", "a"))
    closed(run_file(tmp_path))
    (tmp_path / "out").rename(tmp_path / "moved")
    path = run_file(tmp_path, "max_attempts = 9\n")
    path.write_text(path.read_text().replace('"out"', '"moved"'))
    prepared = closed(path)[0]
    assert not prepared.created
    assert (prepared.spec.max_attempts, prepared.spec.output) == (9, str(tmp_path / "moved"))
    assert prepared.inputs.spec == prepared.spec


@pytest.mark.parametrize(
    ("extra", "names"),
    [
        ("boundaries = [1, 2]\n", "boundaries: (1, 2), not (2, 6, 9)"),
        ('final_state = "post_norm"\n', "final_state: 'post_norm', not 'pre_norm'"),
        ('format = "specforge"\n', "format: 'specforge', not 'headrace'"),
        ('engine_model = "x"\n', "engine_model: 'x', not 'model'"),
        ("max_length = 7\n", "dataset: "),
        ('mask = "all"\n', "dataset: "),
    ],
)
def test_another_extraction_in_the_same_place_is_a_conflict_that_names_what_differs(
    tmp_path: Path, extra: str, names: str
) -> None:
    write_data(tmp_path / "data.jsonl", chat("q", "a"))
    closed(run_file(tmp_path))
    message = fails(Conflict, run_file(tmp_path, extra))
    assert names in message
    assert "belongs to another extraction" in message


def test_another_runs_place_is_a_conflict(tmp_path: Path) -> None:
    write_data(tmp_path / "data.jsonl", chat("q", "a"))
    closed(run_file(tmp_path))
    assert "run: 'other', not 'demo'" in fails(Conflict, run_file(tmp_path, name="other"))


@pytest.mark.parametrize("name", ["data.jsonl", "model/tokenizer.json", "model/chat_template.jinja"])
def test_the_digest_follows_each_file_that_the_inputs_follow_from(tmp_path: Path, name: str) -> None:
    write_data(tmp_path / "data.jsonl", chat("q", "a"))
    path = run_file(tmp_path)
    closed(path)
    with (tmp_path / name).open("ab") as file:
        file.write(b"\n")
    assert "dataset: " in fails(Conflict, path)


def test_another_selection_is_another_dataset_but_the_same_one_otherwise_said_is_not(tmp_path: Path) -> None:
    write_data(tmp_path / "data.jsonl", *[ready(1, 2, name=str(index)) for index in range(5)])
    path = run_file(tmp_path)
    assert [entry.sample for entry in closed(path, start=1, end=4)[1]] == ["1", "2", "3"]
    assert not closed(path, start=1, limit=3)[0].created
    message = fails(Conflict, path)
    assert "dataset: " in message
    assert "total: 5, not 3" in message


@pytest.mark.parametrize(
    ("selection", "names"),
    [
        ({}, ["0", "1", "2", "3", "4"]),
        ({"start": 3}, ["3", "4"]),
        ({"end": 2}, ["0", "1"]),
        ({"limit": 1}, ["0"]),
        ({"start": 1, "end": 4, "limit": 2}, ["1", "2"]),
        ({"start": 4, "end": 100, "limit": 100}, ["4"]),
    ],
)
def test_a_selection_counts_over_all_files(tmp_path: Path, selection: dict[str, int], names: list[str]) -> None:
    write_data(tmp_path / "a.jsonl", *[ready(1, 2, name=str(index)) for index in range(3)])
    write_data(tmp_path / "b.jsonl", *[ready(1, 2, name=str(index)) for index in range(3, 5)])
    prepared, entries = closed(run_file(tmp_path, data='["a.jsonl", "b.jsonl"]'), **selection)
    assert [entry.sample for entry in entries] == names
    assert [entry.ordinal for entry in entries] == list(range(prepared.spec.total))


@pytest.mark.parametrize("selection", [{"start": -1}, {"start": 2, "end": 2}, {"limit": 0}, {"end": 0}])
def test_a_selection_of_nothing_is_a_usage_error(tmp_path: Path, selection: dict[str, int]) -> None:
    write_data(tmp_path / "data.jsonl", ready(1, 2))
    assert "choose 0 <= start < end" in fails(UsageError, run_file(tmp_path), **selection)


def test_a_selection_beyond_the_last_sample_is_a_usage_error(tmp_path: Path) -> None:
    write_data(tmp_path / "data.jsonl", ready(1, 2))
    assert "start 1 is beyond the last of 1 samples" in fails(UsageError, run_file(tmp_path), start=1)


@pytest.mark.parametrize("text", ["", "\n \n\n"])
def test_no_samples_are_a_usage_error(tmp_path: Path, text: str) -> None:
    (tmp_path / "data.jsonl").write_text(text)
    assert "data.jsonl: no samples" in fails(UsageError, run_file(tmp_path))


def test_a_missing_data_file_is_a_usage_error(tmp_path: Path) -> None:
    assert "data.jsonl: No such file or directory" in fails(UsageError, run_file(tmp_path))


def test_a_line_that_is_not_json_is_named_and_leaves_nothing(tmp_path: Path) -> None:
    write_data(tmp_path / "data.jsonl", ready(1, 2), ready(1, 2))
    with (tmp_path / "data.jsonl").open("a") as file:
        file.write('\n{"input_ids": [1, \n')
    assert "data.jsonl:4: not JSON" in fails(UsageError, run_file(tmp_path))


def test_a_line_that_is_not_utf8_is_named_and_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "data.jsonl").write_bytes(json.dumps(ready(1, 2)).encode() + b'\n{"id": "\xe9"}\n')
    assert "data.jsonl:2: not UTF-8 at byte 8" in fails(UsageError, run_file(tmp_path))


def test_a_checkpoint_is_told_from_another_by_its_files_and_not_by_its_place(tmp_path: Path) -> None:
    folder = small_checkpoint(tmp_path / "model")
    (folder / "model-1.safetensors").write_bytes(b"weights")
    first = checkpoint_digest(folder)
    assert checkpoint_digest(Path(shutil.copytree(folder, tmp_path / "copy"))) == first
    (folder / "README.md").write_text("no part of it")
    (folder / "model-1.safetensors").write_bytes(b"tuned!!")
    assert checkpoint_digest(folder) == first  # weights are not read
    digests = {first}
    for name, data in (
        ("model-1.safetensors", b"more weights"),
        ("model-2.safetensors", b""),
        ("model.safetensors.index.json", b"{}"),
        ("config.json", b"{}"),
    ):
        (folder / name).write_bytes(data)
        digests.add(checkpoint_digest(folder))
    assert len(digests) == 5

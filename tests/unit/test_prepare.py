"""Preparing a run: inputs whole or absent, resumed only onto the same extraction, every bad input named."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tracemalloc
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from headrace.errors import Conflict, HeadraceError, Unreadable, UsageError
from headrace.masks import decode_mask
from headrace_dispatcher.inputs import Inputs, RejectedSample, Sample
from headrace_dispatcher.prepare import Prepared, prepare
from headrace_dispatcher.runfile import load_run_file
from tests.support.checkpoints import CHATML_MARKED, HIDDEN_SIZE, small_checkpoint, vocab_size

FORMATS = {"headrace", "specforge"}


def _ready(*ids: int, name: str | None = None) -> dict[str, Any]:
    table: dict[str, Any] = {"input_ids": list(ids), "loss_mask": [0] + [1] * (len(ids) - 1)}
    return table if name is None else {"id": name} | table


def _chat(question: str, answer: str, name: str | None = None) -> dict[str, Any]:
    messages = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    return {"messages": messages} if name is None else {"id": name, "messages": messages}


def _data(path: Path, *samples: Any) -> Path:
    path.write_text("".join(json.dumps(sample) + "\n" for sample in samples))
    return path


def _run_file(folder: Path, extra: str = "", data: str = '"data.jsonl"', name: str = "demo") -> Path:
    if not (folder / "model").exists():
        small_checkpoint(folder / "model")
    path = folder / "run.toml"
    path.write_text(f'[run]\nname = "{name}"\ndata = {data}\noutput = "out"\nmodel = "model"\n{extra}')
    return path


def _prepare(path: Path, **selection: Any) -> Prepared:
    return prepare(load_run_file(path), resolve_model=lambda word: None, known_formats=FORMATS, **selection)


def _closed(path: Path, **selection: Any) -> tuple[Prepared, list[Sample | RejectedSample]]:
    prepared = _prepare(path, **selection)
    with prepared.inputs as inputs:
        return prepared, list(inputs.iterate())


def _fails(kind: type[HeadraceError], path: Path, **selection: Any) -> str:
    """The error's message, after proving that the output holds nothing new."""
    output = path.parent / "out"
    before = _files(output)
    with pytest.raises(kind) as caught:
        _prepare(path, **selection)
    assert _files(output) == before
    message = str(caught.value)
    assert "\n" not in message
    return message


def _files(folder: Path) -> dict[str, int] | None:
    if not folder.is_dir():
        return None
    return {str(path.relative_to(folder)): path.stat().st_mtime_ns for path in folder.rglob("*")}


def test_a_run_is_prepared_with_its_spec_and_every_sample(tmp_path: Path) -> None:
    _data(tmp_path / "data.jsonl", _chat("Why?", "Because.", "a"), _ready(1, 2, 3), _chat("q", "a", "a"))
    prepared, entries = _closed(_run_file(tmp_path, 'engine_model = "served"\nmax_attempts = 5\n'))
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
    chat = entries[0]
    assert isinstance(chat, Sample)
    assert sum(decode_mask(chat.mask)) < len(chat.ids)


def test_every_sample_that_cannot_be_used_is_an_entry_with_its_reason(tmp_path: Path) -> None:
    _data(
        tmp_path / "data.jsonl",
        {"text": "x"},
        {"input_ids": [1, 2], "loss_mask": [1]},
        _ready(1, vocab_size(), name="v"),
        {"input_ids": [], "loss_mask": []},
        {"input_ids": [1, 2], "loss_mask": [0, 0]},
        _ready(*[1] * 101),
        _chat("word " * 99, "a"),
        {"messages": [{"role": "assistant", "content": "a"}]},
        {"messages": [{"role": "user", "content": "a"}]},
        {"input_ids": [True, 2], "loss_mask": [0, 1]},
        {"input_ids": [1.0, 2], "loss_mask": [0, 1]},
        {"input_ids": [1, 2], "loss_mask": [0, 3]},
        _ready(1, 2),
    )
    prepared, entries = _closed(_run_file(tmp_path, "max_length = 100\n"))
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
    assert _closed(tmp_path / "run.toml")[0].rejected == prepared.rejected


def test_markers_and_no_markers_make_the_same_inputs(tmp_path: Path) -> None:
    _data(tmp_path / "data.jsonl", _chat("q 😀", "你好 مرحبا\n\n"), _chat("", ""))
    plain = _closed(_run_file(tmp_path))
    (tmp_path / "marked.jinja").write_text(CHATML_MARKED)
    path = _run_file(tmp_path, 'chat_template = "marked.jinja"\n')
    path.write_text(path.read_text().replace('"out"', '"out2"'))
    marked = _closed(path)
    assert plain[1] == marked[1]
    assert plain[0].spec.dataset != marked[0].spec.dataset


def test_a_second_call_uses_what_is_there_and_writes_nothing(tmp_path: Path) -> None:
    _data(tmp_path / "data.jsonl", _chat("q", "a"), {"text": "x"})
    path = _run_file(tmp_path)
    first, entries = _closed(path)
    before = _files(tmp_path / "out")
    second, again = _closed(path)
    assert (first.created, second.created) == (True, False)
    assert second.spec == first.spec
    assert second.rejected == first.rejected == Counter(unknown_form=1)
    assert again == entries
    assert _files(tmp_path / "out") == before


def test_attempts_and_place_may_change_without_being_another_extraction(tmp_path: Path) -> None:
    _data(tmp_path / "data.jsonl", _chat("q", "a"))
    _closed(_run_file(tmp_path))
    (tmp_path / "out").rename(tmp_path / "moved")
    path = _run_file(tmp_path, "max_attempts = 9\n")
    path.write_text(path.read_text().replace('"out"', '"moved"'))
    prepared = _closed(path)[0]
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
    _data(tmp_path / "data.jsonl", _chat("q", "a"))
    _closed(_run_file(tmp_path))
    message = _fails(Conflict, _run_file(tmp_path, extra))
    assert names in message
    assert "belongs to another extraction" in message


def test_another_runs_place_is_a_conflict(tmp_path: Path) -> None:
    _data(tmp_path / "data.jsonl", _chat("q", "a"))
    _closed(_run_file(tmp_path))
    assert "run: 'other', not 'demo'" in _fails(Conflict, _run_file(tmp_path, name="other"))


@pytest.mark.parametrize("name", ["data.jsonl", "model/tokenizer.json", "model/chat_template.jinja"])
def test_the_digest_follows_each_file_that_the_inputs_follow_from(tmp_path: Path, name: str) -> None:
    _data(tmp_path / "data.jsonl", _chat("q", "a"))
    path = _run_file(tmp_path)
    _closed(path)
    with (tmp_path / name).open("ab") as file:
        file.write(b"\n")
    assert "dataset: " in _fails(Conflict, path)


def test_another_selection_is_another_dataset_but_the_same_one_otherwise_said_is_not(tmp_path: Path) -> None:
    _data(tmp_path / "data.jsonl", *[_ready(1, 2, name=str(index)) for index in range(5)])
    path = _run_file(tmp_path)
    assert [entry.sample for entry in _closed(path, start=1, end=4)[1]] == ["1", "2", "3"]
    assert not _closed(path, start=1, limit=3)[0].created
    message = _fails(Conflict, path)
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
    _data(tmp_path / "a.jsonl", *[_ready(1, 2, name=str(index)) for index in range(3)])
    _data(tmp_path / "b.jsonl", *[_ready(1, 2, name=str(index)) for index in range(3, 5)])
    prepared, entries = _closed(_run_file(tmp_path, data='["a.jsonl", "b.jsonl"]'), **selection)
    assert [entry.sample for entry in entries] == names
    assert [entry.ordinal for entry in entries] == list(range(prepared.spec.total))


@pytest.mark.parametrize("selection", [{"start": -1}, {"start": 2, "end": 2}, {"limit": 0}, {"end": 0}])
def test_a_selection_of_nothing_is_a_usage_error(tmp_path: Path, selection: dict[str, int]) -> None:
    _data(tmp_path / "data.jsonl", _ready(1, 2))
    assert "choose 0 <= start < end" in _fails(UsageError, _run_file(tmp_path), **selection)


def test_a_selection_beyond_the_last_sample_is_a_usage_error(tmp_path: Path) -> None:
    _data(tmp_path / "data.jsonl", _ready(1, 2))
    assert "start 1 is beyond the last of 1 samples" in _fails(UsageError, _run_file(tmp_path), start=1)


@pytest.mark.parametrize("text", ["", "\n \n\n"])
def test_no_samples_are_a_usage_error(tmp_path: Path, text: str) -> None:
    (tmp_path / "data.jsonl").write_text(text)
    assert "data.jsonl: no samples" in _fails(UsageError, _run_file(tmp_path))


def test_a_missing_data_file_is_a_usage_error(tmp_path: Path) -> None:
    assert "data.jsonl: No such file or directory" in _fails(UsageError, _run_file(tmp_path))


def test_a_line_that_is_not_json_is_named_and_leaves_nothing(tmp_path: Path) -> None:
    _data(tmp_path / "data.jsonl", _ready(1, 2), _ready(1, 2))
    with (tmp_path / "data.jsonl").open("a") as file:
        file.write('\n{"input_ids": [1, \n')
    assert "data.jsonl:4: not JSON" in _fails(UsageError, _run_file(tmp_path))


def test_a_line_that_is_not_utf8_is_named_and_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "data.jsonl").write_bytes(json.dumps(_ready(1, 2)).encode() + b'\n{"id": "\xe9"}\n')
    assert "data.jsonl:2: not UTF-8 at byte 8" in _fails(UsageError, _run_file(tmp_path))


def test_an_output_that_cannot_be_written_is_a_usage_error(tmp_path: Path) -> None:
    _data(tmp_path / "data.jsonl", _ready(1, 2))
    path = _run_file(tmp_path)
    (tmp_path / "file").write_text("")
    path.write_text(path.read_text().replace('"out"', '"file/out"'))
    assert "file/out cannot be written: Not a directory" in _fails(UsageError, path)
    path.write_text(path.read_text().replace('"file/out"', '"file"'))
    assert "file cannot be used: Not a directory" in _fails(UsageError, path)


def test_an_output_of_another_user_is_a_usage_error(tmp_path: Path) -> None:
    _data(tmp_path / "data.jsonl", _ready(1, 2))
    path = _run_file(tmp_path)
    (tmp_path / "out").mkdir(mode=0o500)
    if os.access(tmp_path / "out", os.W_OK):
        pytest.skip("root may write anywhere")
    assert "cannot be written: Permission denied" in _fails(UsageError, path)


def test_an_output_that_holds_other_files_is_a_conflict(tmp_path: Path) -> None:
    _data(tmp_path / "data.jsonl", _ready(1, 2))
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.doc").write_text("")
    assert "holds thesis.doc and no inputs of a run" in _fails(Conflict, _run_file(tmp_path))


def test_a_folder_called_inputs_that_is_not_ours_is_a_conflict(tmp_path: Path) -> None:
    _data(tmp_path / "data.jsonl", _ready(1, 2))
    (tmp_path / "out" / "inputs").mkdir(parents=True)
    assert "is not of headrace: it has no run.json" in _fails(Conflict, _run_file(tmp_path))


def test_the_root_of_a_volume_counts_as_empty(tmp_path: Path) -> None:
    _data(tmp_path / "data.jsonl", _ready(1, 2))
    (tmp_path / "out" / "lost+found").mkdir(parents=True)
    assert _closed(_run_file(tmp_path))[0].created


def test_damaged_inputs_are_not_written_over(tmp_path: Path) -> None:
    _data(tmp_path / "data.jsonl", _ready(1, 2))
    path = _run_file(tmp_path)
    _closed(path)
    (tmp_path / "out" / "inputs" / "samples.idx").write_bytes(b"")
    assert "is damaged" in _fails(Unreadable, path)


def test_a_data_file_that_changes_while_it_is_read_is_noticed(tmp_path: Path) -> None:
    data = _data(tmp_path / "data.jsonl", *[_ready(1, 2) for _ in range(3)])
    text = data.read_text()

    def change(done: int, total: int) -> None:
        if done == total:
            with data.open("a") as file:
                file.write(text)

    assert "data.jsonl changed while it was read" in _fails(UsageError, _run_file(tmp_path), progress=change)


def test_progress_counts_each_sample(tmp_path: Path) -> None:
    _data(tmp_path / "data.jsonl", _ready(1, 2), {"text": "x"}, _ready(1, 2))
    seen: list[tuple[int, int]] = []
    _closed(_run_file(tmp_path), progress=lambda done, total: seen.append((done, total)))
    assert seen == [(1, 3), (2, 3), (3, 3)]


def test_a_killed_call_leaves_nothing_that_the_next_one_does_not_remove(tmp_path: Path) -> None:
    _data(tmp_path / "data.jsonl", *[_ready(1, 2) for _ in range(3)])
    path = _run_file(tmp_path)
    script = f"""
import os, signal
from pathlib import Path
from headrace_dispatcher.prepare import prepare
from headrace_dispatcher.runfile import load_run_file
prepare(load_run_file(Path({str(path)!r})), resolve_model=lambda word: None, known_formats=["headrace"],
        progress=lambda done, total: done == 2 and os.kill(os.getpid(), signal.SIGKILL))
"""
    killed = subprocess.run([sys.executable, "-c", script], check=False)
    assert killed.returncode == -signal.SIGKILL
    assert [entry.name[:8] for entry in (tmp_path / "out").iterdir()] == [".inputs-"]
    with pytest.raises(UsageError):
        Inputs.open(tmp_path / "out")
    assert len(_closed(path)[1]) == 3
    assert [entry.name for entry in (tmp_path / "out").iterdir()] == ["inputs"]


def test_memory_does_not_grow_with_the_number_of_samples(tmp_path: Path) -> None:
    peaks = []
    for samples in (50, 1000):
        folder = tmp_path / str(samples)
        folder.mkdir()
        _data(folder / "data.jsonl", *[_ready(*range(400)) for _ in range(samples)])
        path = _run_file(folder)
        tracemalloc.start()
        with _prepare(path).inputs as inputs:
            assert sum(1 for _ in inputs.iterate()) == samples
        with _prepare(path).inputs as inputs:
            assert len(inputs) == samples
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[1] < 1.5 * peaks[0]


def test_an_unknown_format_is_a_usage_error(tmp_path: Path) -> None:
    _data(tmp_path / "data.jsonl", _ready(1, 2))
    assert "did you mean 'specforge'" in _fails(UsageError, _run_file(tmp_path, 'format = "specforg"\n'))


def test_boundaries_beyond_the_models_layers_are_a_usage_error(tmp_path: Path) -> None:
    _data(tmp_path / "data.jsonl", _ready(1, 2))
    assert "13 is outside 0 to 12" in _fails(UsageError, _run_file(tmp_path, "boundaries = [1, 13]\n"))


def test_a_folder_without_config_is_no_checkpoint(tmp_path: Path) -> None:
    _data(tmp_path / "data.jsonl", _ready(1, 2))
    path = _run_file(tmp_path)
    (tmp_path / "model" / "config.json").unlink()
    assert "model is no checkpoint folder: it has no config.json" in _fails(UsageError, path)


@pytest.mark.parametrize("text", ["{", "[]", '{"hidden_size": 3}', '{"num_hidden_layers": "12"}'])
def test_a_damaged_config_is_a_usage_error(tmp_path: Path, text: str) -> None:
    _data(tmp_path / "data.jsonl", _ready(1, 2))
    path = _run_file(tmp_path)
    (tmp_path / "model" / "config.json").write_text(text)
    assert "config.json: " in _fails(UsageError, path)


def test_a_multimodal_models_sizes_are_those_of_its_text_part(tmp_path: Path) -> None:
    _data(tmp_path / "data.jsonl", _ready(1, 2))
    path = _run_file(tmp_path)
    config = tmp_path / "model" / "config.json"
    config.write_text(json.dumps({"text_config": json.loads(config.read_text())}))
    assert _closed(path)[0].spec.hidden_size == HIDDEN_SIZE


def test_ready_token_ids_need_neither_tokenizer_nor_template(tmp_path: Path) -> None:
    _data(tmp_path / "data.jsonl", _ready(1, 2))
    path = _run_file(tmp_path)
    (tmp_path / "model" / "tokenizer.json").unlink()
    (tmp_path / "model" / "chat_template.jinja").unlink()
    assert _closed(path)[0].rejected == Counter()


@pytest.mark.parametrize("trust", [False, True])
def test_a_conversation_without_a_fast_tokenizer_says_how_to_get_one(tmp_path: Path, trust: bool) -> None:
    _data(tmp_path / "data.jsonl", _ready(1, 2), _chat("q", "a"))
    path = _run_file(tmp_path, f"trust_remote_code = {str(trust).lower()}\n")
    (tmp_path / "model" / "tokenizer.json").unlink()
    message = _fails(UsageError, path)
    assert "has no tokenizer.json" in message
    assert "save_pretrained" in message
    assert ("does not change this" in message) is trust


def test_a_conversation_without_a_template_says_to_name_one(tmp_path: Path) -> None:
    _data(tmp_path / "data.jsonl", _chat("q", "a"))
    path = _run_file(tmp_path)
    (tmp_path / "model" / "chat_template.jinja").unlink()
    assert "has no chat template; name a jinja file as run.chat_template" in _fails(UsageError, path)
    assert "gone.jinja: no such file" in _fails(UsageError, _run_file(tmp_path, 'chat_template = "gone.jinja"\n'))


@pytest.mark.parametrize("named", [False, True])
def test_a_template_may_be_in_the_tokenizers_config(tmp_path: Path, named: bool) -> None:
    _data(tmp_path / "data.jsonl", _chat("q", "a"))
    path = _run_file(tmp_path)
    expected = _closed(path)[1]
    template = tmp_path / "model" / "chat_template.jinja"
    text = template.read_text()
    template.unlink()
    config = tmp_path / "model" / "tokenizer_config.json"
    entry = [{"name": "other", "template": "x"}, {"name": "default", "template": text}] if named else text
    config.write_text(json.dumps(json.loads(config.read_text()) | {"chat_template": entry}))
    path.write_text(path.read_text().replace('"out"', '"out2"'))
    assert _closed(path)[1] == expected


def test_a_templates_special_tokens_come_from_the_tokenizers_config(tmp_path: Path) -> None:
    _data(tmp_path / "data.jsonl", _chat("q", "a"))
    path = _run_file(tmp_path, 'chat_template = "t.jinja"\nmask = "all"\n')
    (tmp_path / "t.jinja").write_text("{{ bos_token }}{{ eos_token }}{{ unk_token }}")
    (entry,) = _closed(path)[1]
    assert isinstance(entry, Sample)
    assert len(entry.ids) == 2


def test_a_long_message_of_a_template_is_cut_to_one_short_line(tmp_path: Path) -> None:
    _data(tmp_path / "data.jsonl", _chat("q\n" * 2000, "a"))
    path = _run_file(tmp_path, 'chat_template = "t.jinja"\n')
    (tmp_path / "t.jinja").write_text("{{ raise_exception(messages[0].content) }}")
    (entry,) = _closed(path)[1]
    assert isinstance(entry, RejectedSample)
    assert len(entry.detail) <= 300
    assert "\n" not in entry.detail

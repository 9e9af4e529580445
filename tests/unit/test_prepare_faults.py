"""What preparing a run refuses, and what it leaves behind: places, damage, kills, checkpoints."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tracemalloc
from collections import Counter
from pathlib import Path

import pytest

from headrace.errors import Conflict, Unreadable, UsageError
from headrace_dispatcher.inputs import Inputs, RejectedSample, Sample
from tests.support.checkpoints import HIDDEN_SIZE
from tests.support.prepared import chat, closed, fails, prepare_run, ready, run_file, write_data


def test_an_output_that_cannot_be_written_is_a_usage_error(tmp_path: Path) -> None:
    write_data(tmp_path / "data.jsonl", ready(1, 2))
    path = run_file(tmp_path)
    (tmp_path / "file").write_text("")
    path.write_text(path.read_text().replace('"out"', '"file/out"'))
    assert "file/out cannot be written: Not a directory" in fails(UsageError, path)
    path.write_text(path.read_text().replace('"file/out"', '"file"'))
    assert "file cannot be used: Not a directory" in fails(UsageError, path)


def test_an_output_of_another_user_is_a_usage_error(tmp_path: Path) -> None:
    write_data(tmp_path / "data.jsonl", ready(1, 2))
    path = run_file(tmp_path)
    (tmp_path / "out").mkdir(mode=0o500)
    if os.access(tmp_path / "out", os.W_OK):
        pytest.skip("root may write anywhere")
    assert "cannot be written: Permission denied" in fails(UsageError, path)


def test_an_output_that_holds_other_files_is_a_conflict(tmp_path: Path) -> None:
    write_data(tmp_path / "data.jsonl", ready(1, 2))
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.doc").write_text("")
    assert "holds thesis.doc and no inputs of a run" in fails(Conflict, run_file(tmp_path))


def test_a_folder_called_inputs_that_is_not_ours_is_a_conflict(tmp_path: Path) -> None:
    write_data(tmp_path / "data.jsonl", ready(1, 2))
    (tmp_path / "out" / "inputs").mkdir(parents=True)
    assert "is not of headrace: it has no run.json" in fails(Conflict, run_file(tmp_path))


def test_the_root_of_a_volume_counts_as_empty(tmp_path: Path) -> None:
    write_data(tmp_path / "data.jsonl", ready(1, 2))
    (tmp_path / "out" / "lost+found").mkdir(parents=True)
    assert closed(run_file(tmp_path))[0].created


def test_damaged_inputs_are_not_written_over(tmp_path: Path) -> None:
    write_data(tmp_path / "data.jsonl", ready(1, 2))
    path = run_file(tmp_path)
    closed(path)
    (tmp_path / "out" / "inputs" / "samples.idx").write_bytes(b"")
    assert "is damaged" in fails(Unreadable, path)


def test_a_data_file_that_changes_while_it_is_read_is_noticed(tmp_path: Path) -> None:
    data = write_data(tmp_path / "data.jsonl", *[ready(1, 2) for _ in range(3)])
    text = data.read_text()

    def change(done: int, total: int) -> None:
        if done == total:
            with data.open("a") as file:
                file.write(text)

    assert "data.jsonl changed while it was read" in fails(UsageError, run_file(tmp_path), progress=change)


def test_progress_counts_each_sample(tmp_path: Path) -> None:
    write_data(tmp_path / "data.jsonl", ready(1, 2), {"text": "x"}, ready(1, 2))
    seen: list[tuple[int, int]] = []
    closed(run_file(tmp_path), progress=lambda done, total: seen.append((done, total)))
    assert seen == [(1, 3), (2, 3), (3, 3)]


def test_a_killed_call_leaves_nothing_that_the_next_one_does_not_remove(tmp_path: Path) -> None:
    write_data(tmp_path / "data.jsonl", *[ready(1, 2) for _ in range(3)])
    path = run_file(tmp_path)
    script = f"""
import os, signal
from pathlib import Path
from headrace.formats import FORMATS
from headrace_dispatcher.prepare import prepare
from headrace_dispatcher.runfile import load_run_file
prepare(load_run_file(Path({str(path)!r})), resolve_model=lambda word: None, known_formats=FORMATS,
        progress=lambda done, total: done == 2 and os.kill(os.getpid(), signal.SIGKILL))
"""
    killed = subprocess.run([sys.executable, "-c", script], check=False)
    assert killed.returncode == -signal.SIGKILL
    assert [entry.name[:8] for entry in (tmp_path / "out").iterdir()] == [".inputs-"]
    with pytest.raises(UsageError):
        Inputs.open(tmp_path / "out")
    assert len(closed(path)[1]) == 3
    assert [entry.name for entry in (tmp_path / "out").iterdir()] == ["inputs"]


def test_memory_does_not_grow_with_the_number_of_samples(tmp_path: Path) -> None:
    peaks = []
    for samples in (50, 1000):
        folder = tmp_path / str(samples)
        folder.mkdir()
        write_data(folder / "data.jsonl", *[ready(*range(400)) for _ in range(samples)])
        path = run_file(folder)
        tracemalloc.start()
        with prepare_run(path).inputs as inputs:
            assert sum(1 for ordinal in range(len(inputs)) if inputs[ordinal]) == samples
        with prepare_run(path).inputs as inputs:
            assert len(inputs) == samples
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[1] < 1.5 * peaks[0]


def test_an_unknown_format_is_a_usage_error(tmp_path: Path) -> None:
    write_data(tmp_path / "data.jsonl", ready(1, 2))
    assert "did you mean 'specforge'" in fails(UsageError, run_file(tmp_path, 'format = "specforg"\n'))


def test_boundaries_beyond_the_models_layers_are_a_usage_error(tmp_path: Path) -> None:
    write_data(tmp_path / "data.jsonl", ready(1, 2))
    assert "13 is outside 0 to 12" in fails(UsageError, run_file(tmp_path, "boundaries = [1, 13]\n"))


def test_a_folder_without_config_is_no_checkpoint(tmp_path: Path) -> None:
    write_data(tmp_path / "data.jsonl", ready(1, 2))
    path = run_file(tmp_path)
    (tmp_path / "model" / "config.json").unlink()
    assert "model is no checkpoint folder: it has no config.json" in fails(UsageError, path)


@pytest.mark.parametrize("text", ["{", "[]", '{"hidden_size": 3}', '{"num_hidden_layers": "12"}'])
def test_a_damaged_config_is_a_usage_error(tmp_path: Path, text: str) -> None:
    write_data(tmp_path / "data.jsonl", ready(1, 2))
    path = run_file(tmp_path)
    (tmp_path / "model" / "config.json").write_text(text)
    assert "config.json: " in fails(UsageError, path)


def test_a_multimodal_models_sizes_are_those_of_its_text_part(tmp_path: Path) -> None:
    write_data(tmp_path / "data.jsonl", ready(1, 2))
    path = run_file(tmp_path)
    config = tmp_path / "model" / "config.json"
    config.write_text(json.dumps({"text_config": json.loads(config.read_text())}))
    assert closed(path)[0].spec.hidden_size == HIDDEN_SIZE


def test_ready_token_ids_need_neither_tokenizer_nor_template(tmp_path: Path) -> None:
    write_data(tmp_path / "data.jsonl", ready(1, 2))
    path = run_file(tmp_path)
    (tmp_path / "model" / "tokenizer.json").unlink()
    (tmp_path / "model" / "chat_template.jinja").unlink()
    assert closed(path)[0].rejected == Counter()


@pytest.mark.parametrize("trust", [False, True])
def test_a_conversation_without_a_fast_tokenizer_says_how_to_get_one(tmp_path: Path, trust: bool) -> None:
    write_data(tmp_path / "data.jsonl", ready(1, 2), chat("q", "a"))
    path = run_file(tmp_path, f"trust_remote_code = {str(trust).lower()}\n")
    (tmp_path / "model" / "tokenizer.json").unlink()
    message = fails(UsageError, path)
    assert "has no tokenizer.json" in message
    assert "save_pretrained" in message
    assert ("does not change this" in message) is trust


def test_a_conversation_without_a_template_says_to_name_one(tmp_path: Path) -> None:
    write_data(tmp_path / "data.jsonl", chat("q", "a"))
    path = run_file(tmp_path)
    (tmp_path / "model" / "chat_template.jinja").unlink()
    assert "has no chat template; name a jinja file as run.chat_template" in fails(UsageError, path)
    assert "gone.jinja: no such file" in fails(UsageError, run_file(tmp_path, 'chat_template = "gone.jinja"\n'))


@pytest.mark.parametrize("named", [False, True])
def test_a_template_may_be_in_the_tokenizers_config(tmp_path: Path, named: bool) -> None:
    write_data(tmp_path / "data.jsonl", chat("q", "a"))
    path = run_file(tmp_path)
    expected = closed(path)[1]
    template = tmp_path / "model" / "chat_template.jinja"
    text = template.read_text()
    template.unlink()
    config = tmp_path / "model" / "tokenizer_config.json"
    entry = [{"name": "other", "template": "x"}, {"name": "default", "template": text}] if named else text
    config.write_text(json.dumps(json.loads(config.read_text()) | {"chat_template": entry}))
    path.write_text(path.read_text().replace('"out"', '"out2"'))
    assert closed(path)[1] == expected


def test_a_templates_special_tokens_come_from_the_tokenizers_config(tmp_path: Path) -> None:
    write_data(tmp_path / "data.jsonl", chat("q", "a"))
    path = run_file(tmp_path, 'chat_template = "t.jinja"\nmask = "all"\n')
    (tmp_path / "t.jinja").write_text("{{ bos_token }}{{ eos_token }}{{ unk_token }}")
    (entry,) = closed(path)[1]
    assert isinstance(entry, Sample)
    assert len(entry.ids) == 2


def test_a_long_message_of_a_template_is_cut_to_one_short_line(tmp_path: Path) -> None:
    write_data(tmp_path / "data.jsonl", chat("q\n" * 2000, "a"), ready(1, 2))
    path = run_file(tmp_path, 'chat_template = "t.jinja"\n')
    (tmp_path / "t.jinja").write_text("{{ raise_exception(messages[0].content) }}")
    entry, _ = closed(path)[1]
    assert isinstance(entry, RejectedSample)
    assert len(entry.detail) <= 300
    assert "\n" not in entry.detail

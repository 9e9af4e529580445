"""Run files: what they may say, and the one line that each fault gets."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from headrace.errors import UsageError
from headrace.formats import FORMATS, FormatNeeds
from headrace_dispatcher.runfile import RunFile, load_run_file

WHOLE = '[run]\nname = "demo"\ndata = "samples.jsonl"\noutput = "out"\nmodel = "models/tiny"\n'


def _write(folder: Path, text: str) -> Path:
    path = folder / "run.toml"
    path.write_text(text)
    return path


def _load(folder: Path, extra: str = "") -> RunFile:
    return load_run_file(_write(folder, WHOLE + extra))


def _fault(folder: Path, text: str) -> str:
    with pytest.raises(UsageError) as caught:
        load_run_file(_write(folder, text))
    message = str(caught.value)
    assert "run.toml" in message
    assert "\n" not in message
    return message


def test_what_is_not_said_has_its_default(tmp_path: Path) -> None:
    run = _load(tmp_path)
    assert run.name == "demo"
    assert run.data == (tmp_path / "samples.jsonl",)
    assert run.output == tmp_path / "out"
    assert run.engine_model == "models/tiny"
    assert (run.boundaries, run.final_state, run.format) == ("eagle3", "pre_norm", "headrace")
    assert (run.max_length, run.max_attempts, run.mask) == (4096, 3, "assistant")
    assert run.chat_template is None
    assert run.trust_remote_code is False


def test_every_key_is_taken_as_written(tmp_path: Path) -> None:
    text = """[run]
name = "all"
data = ["a.jsonl", "/elsewhere/b.jsonl"]
output = "../out"
model = "smollm2"
engine_model = "served"
boundaries = [0, 3, 12]
final_state = "post_norm"
format = "specforge"
max_length = 100
max_attempts = 1
chat_template = "t.jinja"
mask = "last_assistant"
trust_remote_code = true
"""
    run = load_run_file(_write(tmp_path, text))
    assert run.data == (tmp_path / "a.jsonl", Path("/elsewhere/b.jsonl"))
    assert run.output == tmp_path.parent / "out"
    assert (run.model, run.engine_model) == ("smollm2", "served")
    assert run.boundaries == (0, 3, 12)
    assert (run.final_state, run.format, run.mask) == ("post_norm", "specforge", "last_assistant")
    assert (run.max_length, run.max_attempts) == (100, 1)
    assert run.chat_template == tmp_path / "t.jinja"
    assert run.trust_remote_code is True


def test_an_unknown_key_is_named_with_the_nearest_known_one(tmp_path: Path) -> None:
    message = _fault(tmp_path, WHOLE + "boundary = [1]\n")
    assert "run.boundary is an unknown key" in message
    assert "did you mean 'boundaries'?" in message


def test_an_unknown_key_like_no_other_gets_no_guess(tmp_path: Path) -> None:
    message = _fault(tmp_path, WHOLE + "zzz = 1\n")
    assert "run.zzz is an unknown key" in message
    assert "did you mean" not in message


def test_a_missing_key_is_named_with_what_to_give(tmp_path: Path) -> None:
    message = _fault(tmp_path, '[run]\nname = "demo"\ndata = "a"\noutput = "b"\n')
    assert "run.model is missing: give a checkpoint folder" in message


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ('max_length = "100"', "run.max_length = '100': give a whole number of tokens"),
        ("max_length = 0", "run.max_length = '0'"),
        ("max_length = 10.5", "run.max_length = '10.5'"),
        ("max_attempts = true", "run.max_attempts = 'True': give a whole number"),
        ('boundaries = "eagle"', "run.boundaries = 'eagle': give \"eagle3\" or an ascending list"),
        ("boundaries = []", "run.boundaries = '[]'"),
        ("boundaries = [1, 2.0]", "run.boundaries = '[1, 2.0]'"),
        ("boundaries = [true, 2]", "run.boundaries = '[True, 2]'"),
        ("boundaries = [3, 2]", "boundaries [3, 2]: give ascending boundaries"),
        ("boundaries = [2, 2]", "boundaries [2, 2]: give ascending boundaries"),
        ("boundaries = [-1, 2]", "boundaries [-1, 2]: give ascending boundaries"),
        ('final_state = "prenorm"', 'run.final_state = \'prenorm\': give "pre_norm" or "post_norm"'),
        ('mask = "user"', "run.mask = 'user': give \"assistant\""),
        ("trust_remote_code = 1", "run.trust_remote_code = '1': give true or false"),
        ('engine_model = ""', "run.engine_model = '': give the name"),
    ],
)
def test_a_wrong_value_is_named_with_what_to_give(tmp_path: Path, line: str, says: str) -> None:
    assert says in _fault(tmp_path, WHOLE + line + "\n")


@pytest.mark.parametrize(
    ("value", "says"),
    [(r"a\u0000b", "embedded null"), ("~no-such-user/x", "home directory"), ("loop/x", "Symlink loop")],
)
@pytest.mark.parametrize("key", ["data", "output", "chat_template", "model"])
def test_a_path_that_cannot_be_is_named_with_its_key(tmp_path: Path, key: str, value: str, says: str) -> None:
    (tmp_path / "loop").symlink_to("loop")
    lines = [line for line in WHOLE.splitlines() if not line.startswith(key)]
    run_file = _write(tmp_path, "\n".join([*lines, f'{key} = "{value}"\n']))
    with pytest.raises(UsageError) as caught:
        load_run_file(run_file).model_folder(lambda word: None)
    message = str(caught.value)
    assert message.startswith(f"{run_file}: run.{key} = ")
    assert says in message
    assert message.isprintable()


@pytest.mark.parametrize("data", ["[]", '""', "3", '["a", 3]'])
def test_data_that_is_no_path_is_refused(tmp_path: Path, data: str) -> None:
    message = _fault(tmp_path, WHOLE.replace('"samples.jsonl"', data))
    assert "give the path of a JSONL file, or a list of such paths" in message


@pytest.mark.parametrize("name", ["Demo", "a-b", "", "x" * 25, "canary"])
def test_a_name_that_cannot_be_in_a_request_id_is_refused(tmp_path: Path, name: str) -> None:
    assert f"run name {name!r}" in _fault(tmp_path, WHOLE.replace('"demo"', f'"{name}"'))


def test_all_faults_are_in_one_line(tmp_path: Path) -> None:
    message = _fault(tmp_path, WHOLE + "outputs = 1\nmax_attempts = 0\n")
    assert "run.outputs" in message
    assert "run.max_attempts" in message


def test_a_file_that_is_not_toml_is_refused(tmp_path: Path) -> None:
    assert "not TOML" in _fault(tmp_path, "[run\n")


def test_a_file_that_is_not_utf8_is_refused(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_bytes(b'[run]\nname = "\xff"\n')
    with pytest.raises(UsageError, match="not TOML"):
        load_run_file(tmp_path / "run.toml")


def test_a_folder_whose_name_is_no_text_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / os.fsdecode(b"\xff\xfe")
    folder.mkdir()
    assert "run.data = 'samples.jsonl' is below a folder whose name is no UTF-8 text" in _fault(folder, WHOLE)


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"nowhere.toml: No such file"):
        load_run_file(tmp_path / "nowhere.toml")


def test_keys_outside_the_table_are_refused(tmp_path: Path) -> None:
    assert "no [run] table" in _fault(tmp_path, 'name = "demo"\n')
    assert "'modle' is outside the [run] table; did you mean 'model'?" in _fault(tmp_path, 'modle = "x"\n' + WHOLE)


def test_eagle3_follows_the_models_layers(tmp_path: Path) -> None:
    run = _load(tmp_path)
    assert run.resolve_boundaries(32) == (2, 16, 29)
    assert run.resolve_boundaries(30) == (2, 15, 27)


def test_eagle3_of_a_model_with_few_layers_asks_for_a_list(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="only 6 layers; give a list"):
        _load(tmp_path).resolve_boundaries(6)


def test_a_boundary_may_be_the_embeddings_or_the_last_layers_output_but_no_further(tmp_path: Path) -> None:
    run = _load(tmp_path, "boundaries = [0, 12]\n")
    assert run.resolve_boundaries(12) == (0, 12)
    with pytest.raises(UsageError, match="12 is outside 0 to 11"):
        run.resolve_boundaries(11)


def test_a_known_models_word_is_resolved_and_anything_else_is_a_path(tmp_path: Path) -> None:
    run = _load(tmp_path)
    assert run.model_folder(lambda word: None) == tmp_path / "models/tiny"
    assert run.model_folder({"models/tiny": Path("/known")}.get) == Path("/known")


def test_an_unknown_format_is_named_with_the_nearest_known_one(tmp_path: Path) -> None:
    run = _load(tmp_path, 'format = "specforg"\n')
    with pytest.raises(UsageError, match=r"did you mean 'specforge'.*known are headrace, specforge"):
        run.check_format(FORMATS)


def test_a_format_that_cannot_be_made_from_the_runs_final_state_is_refused(tmp_path: Path) -> None:
    run = _load(tmp_path, 'final_state = "pre_norm"\n')
    assert run.check_format(FORMATS) == "headrace"
    with pytest.raises(UsageError, match=r"run.format = 'headrace' is made from 'post_norm'.*not 'pre_norm'"):
        run.check_format({"headrace": FormatNeeds(takes=frozenset({"post_norm"}))})


@pytest.mark.parametrize("boundaries", ["[2, 5]", "[0, 2, 5, 7]"])
def test_a_format_that_cannot_be_made_from_the_runs_boundaries_is_refused(tmp_path: Path, boundaries: str) -> None:
    run = _load(tmp_path, f'format = "specforge"\nboundaries = {boundaries}\n')
    with pytest.raises(UsageError) as caught:
        run.check_format(FORMATS)
    assert f"is made from 3 boundaries; give run.boundaries so many, or 'eagle3', not {boundaries}" in str(caught.value)


@pytest.mark.parametrize("boundaries", ['"eagle3"', "[0, 1, 12]"])
@pytest.mark.parametrize("final_state", ["pre_norm", "post_norm"])
def test_specforge_is_made_from_three_boundaries_and_either_final_state(
    tmp_path: Path, boundaries: str, final_state: str
) -> None:
    text = f'format = "specforge"\nboundaries = {boundaries}\nfinal_state = "{final_state}"\n'
    assert _load(tmp_path, text).check_format(FORMATS) == "specforge"


def test_paths_are_relative_to_where_a_linked_run_file_seems_to_be(tmp_path: Path) -> None:
    (tmp_path / "..data").mkdir()
    real = _write(tmp_path / "..data", WHOLE)
    (tmp_path / "run.toml").symlink_to(real)
    assert load_run_file(tmp_path / "run.toml").output == tmp_path / "out"

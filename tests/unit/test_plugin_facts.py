from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from headrace_capture.plugin.facts import checkpoint_digest, fingerprint, forward_rows, resolved

ARGUMENTS: dict[str, Any] = {"version": "0.5.23", "model_path": "org/model", "tp_size": 8}


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(b"0" * 100)
    (folder / "README.md").write_text("hello")
    return folder


def test_the_line_names_what_the_states_follow_from() -> None:
    assert fingerprint(ARGUMENTS, "bfloat16") == "sglang 0.5.23 org/model bfloat16 tp8"
    more = {
        "revision": "abc",
        "quantization": "fp8",
        "kv_cache_dtype": "fp8_e4m3",
        "json_model_override_args": '{"a": 1}',
        "load_format": "dummy",
        "attn_dp_size": 4,
    }
    assert fingerprint({**ARGUMENTS, **more}, "bfloat16") == (
        "sglang 0.5.23 org/model bfloat16 revision=abc quantization=fp8 kv_cache_dtype=fp8_e4m3 "
        'json_model_override_args={"a": 1} load_format=dummy tp8 dp4'
    )


def test_it_does_not_depend_on_what_changes_nothing_or_differs_between_ranks() -> None:
    plain = {"kv_cache_dtype": "auto", "load_format": "auto", "json_model_override_args": "{}", "node_rank": 1}
    assert fingerprint({**ARGUMENTS, **plain}, "bfloat16") == fingerprint(ARGUMENTS, "bfloat16")


def test_a_checkpoint_on_this_machine_is_named_by_its_content_also(checkpoint: Path) -> None:
    digest = checkpoint_digest(checkpoint)
    assert len(digest) == 16
    line = fingerprint({**ARGUMENTS, "model_path": str(checkpoint)}, "bfloat16")
    assert line == f"sglang 0.5.23 {checkpoint} {digest} bfloat16 tp8"
    (checkpoint / "README.md").write_text("another")
    assert checkpoint_digest(checkpoint) == digest


@pytest.mark.parametrize("change", ["config.json", "model.safetensors", "model-2.safetensors"])
def test_another_content_is_another_checkpoint(checkpoint: Path, change: str) -> None:
    digest = checkpoint_digest(checkpoint)
    (checkpoint / change).write_bytes(b"1" * 99)
    assert checkpoint_digest(checkpoint) != digest


def test_a_file_of_weights_is_a_checkpoint_and_a_name_is_none(tmp_path: Path) -> None:
    weights = tmp_path / "model.gguf"
    weights.write_bytes(b"0")
    assert len(checkpoint_digest(weights)) == 16
    assert checkpoint_digest(tmp_path / "nothing") == checkpoint_digest(Path("org/model")) == ""


def test_arguments_are_read_as_they_were_resolved() -> None:
    class Later(SimpleNamespace):
        def resolved_dict(self) -> dict[str, Any]:
            return {"speculative_algorithm": None}

    assert resolved(SimpleNamespace(tp_size=2)) == {"tp_size": 2}
    assert resolved(Later(speculative_algorithm="EAGLE3")) == {"speculative_algorithm": None}


@pytest.mark.parametrize(
    ("arguments", "rows"),
    [
        ({"chunked_prefill_size": 8192, "max_prefill_tokens": 16384, "context_length": 32768}, 8192),
        ({"chunked_prefill_size": -1, "max_prefill_tokens": 16384, "context_length": 32768}, 32768),
        ({"chunked_prefill_size": None, "max_prefill_tokens": 16384, "context_length": None}, 16384),
        ({}, None),
    ],
)
def test_the_largest_forward_is_the_chunk_or_where_prompts_are_not_cut_the_longest(
    arguments: dict[str, Any], rows: int | None
) -> None:
    assert forward_rows(arguments) == rows

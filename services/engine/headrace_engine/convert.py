"""Turns a Llama model in a GGUF file into a Hugging Face checkpoint, with gguf, numpy and tokenizers only."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from gguf import GGUFReader, dequantize
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from headrace.errors import Unreadable
from headrace.tensorfile import encode_header, layout

# Names: llama.cpp's gguf-py/gguf/tensor_mapping.py against transformers' modeling_llama.py.
_TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_IN_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_CONTROL_TOKEN = 3  # gguf.TokenType.CONTROL
_TOKENIZER_FIELDS = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}  # ours, GGUF's

Weights = npt.NDArray[np.float32]


def convert(source: Path, folder: Path) -> None:
    """Write the checkpoint of the GGUF file `source`, in float32, into the existing `folder`.

    The files are config.json, generation_config.json, model.safetensors, tokenizer.json,
    tokenizer_config.json and chat_template.jinja. Quantised weights are dequantised, nothing else changes.

    Raises:
        Unreadable: the file is no GGUF file, or not a Llama model with SmolLM's tokenizer.
    """
    try:
        reader = GGUFReader(source)
        fields = {name: field.contents() for name, field in reader.fields.items()}
    except (ValueError, KeyError, IndexError) as error:
        raise Unreadable(f"{source} is not a whole GGUF file: {error}") from error
    kind = tuple(fields.get(name) for name in ("general.architecture", "tokenizer.ggml.model", "tokenizer.ggml.pre"))
    if kind != ("llama", "gpt2", "smollm"):
        raise Unreadable(f"{source} holds {kind}; only Llama models with SmolLM's tokenizer are converted")
    _write_weights(reader, fields, folder / "model.safetensors")
    _write_config(fields, folder, tied=all(tensor.name != "output.weight" for tensor in reader.tensors))
    _write_tokenizer(fields, folder)


def _write_weights(reader: GGUFReader, fields: Mapping[str, Any], path: Path) -> None:
    heads = {
        "attn_q": int(fields["llama.attention.head_count"]),
        "attn_k": int(fields["llama.attention.head_count_kv"]),
    }
    tensors = [(tensor, *_names(tensor.name)) for tensor in reader.tensors]
    # GGUF gives the fastest axis first.
    shapes = [(name, "F32", tuple(int(n) for n in reversed(tensor.shape))) for tensor, name, _ in tensors]
    with path.open("wb") as file:
        file.write(encode_header(layout(shapes), {"format": "pt"}))
        for tensor, _, part in tensors:  # one at a time: the memory of one tensor
            weights: Weights = dequantize(tensor.data, tensor.tensor_type)
            if part in heads:
                weights = _rope_order(weights, heads[part])
            file.write(np.ascontiguousarray(weights, "<f4").data)


def _names(name: str) -> tuple[str, str]:
    """Name a tensor as transformers does, and give llama.cpp's name of its part."""
    match name.removesuffix(".weight").split("."):
        case ["blk", layer, part] if part in _IN_LAYER:
            return f"model.layers.{layer}.{_IN_LAYER[part]}.weight", part
        case [part] if part in _TOP:
            return f"{_TOP[part]}.weight", part
    raise Unreadable(f"tensor {name!r} has no place in a Llama checkpoint")


def _rope_order(weights: Weights, heads: int) -> Weights:
    """Order a projection's rows as transformers rotates them, undoing `permute` of llama.cpp's conversion."""
    rows, columns = weights.shape
    return weights.reshape(heads, rows // heads // 2, 2, columns).swapaxes(1, 2).reshape(rows, columns)


def _write_config(fields: Mapping[str, Any], folder: Path, *, tied: bool) -> None:
    width, heads = int(fields["llama.embedding_length"]), int(fields["llama.attention.head_count"])
    theta = float(fields["llama.rope.freq_base"])
    tokens = {
        f"{ours}_token_id": fields.get(f"tokenizer.ggml.{theirs}_token_id")
        for ours, theirs in _TOKENIZER_FIELDS.items()
    }
    del tokens["unk_token_id"]
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": width,
        "intermediate_size": fields["llama.feed_forward_length"],
        "num_hidden_layers": fields["llama.block_count"],
        "num_attention_heads": heads,
        "num_key_value_heads": fields["llama.attention.head_count_kv"],
        "head_dim": width // heads,
        "vocab_size": len(fields["tokenizer.ggml.tokens"]),
        "max_position_embeddings": fields["llama.context_length"],
        # GGUF stores a float32: 1e-05 reads as 9.99999974e-06.
        "rms_norm_eps": float(f"{fields['llama.attention.layer_norm_rms_epsilon']:.3g}"),
        "rope_theta": theta,  # transformers 4 and SGLang; the next line is transformers 5's
        "rope_parameters": {"rope_type": "default", "rope_theta": theta},
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": tied,
        "dtype": "float32",
        **tokens,
    }
    _write_json(folder / "config.json", config)
    _write_json(folder / "generation_config.json", tokens)


def _write_tokenizer(fields: Mapping[str, Any], folder: Path) -> None:
    tokens: Sequence[str] = fields["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in fields["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    # llama.cpp's "smollm": each digit alone, then GPT-2's split.
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    types = fields["tokenizer.ggml.token_type"]
    tokenizer.add_special_tokens(
        [
            AddedToken(token, special=True, normalized=False)
            for token, kind in zip(tokens, types, strict=True)
            if kind == _CONTROL_TOKEN
        ]
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    named = {
        f"{ours}_token": tokens[fields[f"tokenizer.ggml.{theirs}_token_id"]]
        for ours, theirs in _TOKENIZER_FIELDS.items()
        if f"tokenizer.ggml.{theirs}_token_id" in fields
    }
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": fields["llama.context_length"],
        "clean_up_tokenization_spaces": False,
        "add_bos_token": False,
        **named,
    }
    template = fields["tokenizer.chat_template"]
    _write_json(folder / "tokenizer_config.json", {**settings, "chat_template": template})
    (folder / "chat_template.jinja").write_text(template, encoding="utf-8")


def _write_json(path: Path, table: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(table, indent=2) + "\n", encoding="utf-8")

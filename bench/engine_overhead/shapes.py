"""Models by shape: a folder with a `config.json`, which SGLang fills with dummy weights."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_TOKENS = {"bos_token_id": 1, "eos_token_id": 2, "tie_word_embeddings": False}
_NORMS = {"rms_norm_eps": 1e-5, "hidden_act": "silu", "max_position_embeddings": 32768, "torch_dtype": "bfloat16"}
_LLAMA = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "rope_theta": 500000.0, **_TOKENS, **_NORMS}

SHAPES: Mapping[str, Mapping[str, Any]] = {
    # Small enough for a CPU, and with rows wide enough that copying them is seen.
    "tiny": _LLAMA
    | {
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": 8,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "vocab_size": 4096,
    },
    # Llama 3.2 1B and Llama 3 8B, the head of the first not tied to its embedding.
    "1b": _LLAMA
    | {
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "vocab_size": 128256,
    },
    "8b": _LLAMA
    | {
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 128256,
    },
    # Rows as wide as those of DeepSeek V3 and Kimi K2.5, in a model of experts that fits one GPU.
    "moe": {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "hidden_size": 7168,
        "intermediate_size": 18432,
        "num_hidden_layers": 16,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 163840,
        "num_experts": 16,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 2048,
        "decoder_sparse_step": 1,
        "norm_topk_prob": True,
        "mlp_only_layers": [],
        "rope_theta": 1000000.0,
        **_TOKENS,
        **_NORMS,
    },
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """A model's folder, and the size of its vocabulary."""

    name: str
    folder: Path
    vocabulary: int


def model_of(shape: str, scratch: Path) -> Model:
    """The model of a shape, whose folder is made in `scratch`, or the one that lies in the folder `shape`.

    Raises:
        FileNotFoundError: it is neither.
    """
    config = SHAPES.get(shape)
    if config is None:
        folder = Path(shape).absolute()
        table = json.loads((folder / "config.json").read_text())
        text = table.get("text_config", table)  # of a model that sees, too
        return Model(name=folder.name, folder=folder, vocabulary=int(text["vocab_size"]))
    folder = scratch / shape
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    return Model(name=shape, folder=folder, vocabulary=int(config["vocab_size"]))

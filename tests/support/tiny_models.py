"""Tiny checkpoints with random weights and a small but real tokenizer, made on the spot."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
_TEXT = (
    "system user assistant The channel carries water to the mill, and the wheel turns the stone.",
    "How many rows does a chunk of a long prompt have? It has as many as the budget of the step leaves.",
    "def answer(question: str) -> str:\n    return 'forty-two' if question else ''\n",
    "Write a short letter to a friend about the weather in the mountains, and what you saw there.",
)


def tiny_llama(
    folder: Path, *, layers: int = 8, hidden: int = 64, vocab: int = 400, dtype: str = "float32", seed: int = 0
) -> Path:
    """Write a Llama into `folder`: `layers` decoder layers of width `hidden`, 8192 positions, untied head.

    The weights come from `seed`; norm weights differ from one another, so that a state before the norm is never
    one after it. The tokenizer is a byte-level BPE of `vocab` tokens (259 to 420) with a ChatML template.
    """
    model = LlamaForCausalLM(LlamaConfig(**_sizes(layers, hidden, vocab)))
    return _write(folder, model, hidden=hidden, vocab=vocab, dtype=dtype, seed=seed)


def tiny_qwen3(
    folder: Path, *, layers: int = 8, hidden: int = 64, vocab: int = 400, dtype: str = "float32", seed: int = 0
) -> Path:
    """The same as a Qwen3, whose attention has norms of its own."""
    model = Qwen3ForCausalLM(Qwen3Config(**_sizes(layers, hidden, vocab)))
    return _write(folder, model, hidden=hidden, vocab=vocab, dtype=dtype, seed=seed)


def tiny_qwen3_moe(
    folder: Path, *, layers: int = 8, hidden: int = 64, vocab: int = 400, dtype: str = "float32", seed: int = 0
) -> Path:
    """The same as a Qwen3 with four experts in each layer, of which a token takes two."""
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": hidden}
    model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**_sizes(layers, hidden, vocab), **experts))
    return _write(folder, model, hidden=hidden, vocab=vocab, dtype=dtype, seed=seed)


def _sizes(layers: int, hidden: int, vocab: int) -> dict[str, Any]:
    end, start, stop = range(len(SPECIAL))
    return {
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": 3 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": hidden // 4,
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
        "bos_token_id": start,
        "eos_token_id": stop,
        "pad_token_id": end,
    }


def _write(folder: Path, model: Any, *, hidden: int, vocab: int, dtype: str, seed: int) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = _tokenizer(vocab)
    tokenizer.save(str(folder / "tokenizer.json"))
    assert [tokenizer.token_to_id(token) for token in SPECIAL] == list(range(len(SPECIAL)))
    table = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": 8192,
        "clean_up_tokenization_spaces": False,
        "bos_token": "<|im_start|>",
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(table, indent=2))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weights in model.named_parameters():
            noise = torch.randn(weights.shape, generator=generator)
            weights.copy_(1 + 0.2 * noise if "norm" in name else noise * hidden**-0.5)
    model.to(getattr(torch, dtype)).save_pretrained(folder)
    return folder


def _tokenizer(vocab: int) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab,
        special_tokens=[AddedToken(token, special=True, normalized=False) for token in SPECIAL],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_TEXT, trainer)
    return tokenizer

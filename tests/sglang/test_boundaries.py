"""The layers that are captured are those that the header names: by the real classes' setters, and by values."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from headrace.dumpfolder import read_norm
from headrace.dumps import POST_NORM, PRE_NORM
from headrace.finalnorm import norm_file
from tests.sglang.env import HERE, NEWEST, OLDEST
from tests.sglang.server import LLAMA_LOGITS, QWEN3_TP2, SMOL, ServerConfig, Servers, SglangServer
from tests.sglang.values import Truth, assert_near, assert_right, capture, prompts, texts

FIVE = ServerConfig(model="qwen3_moe", chunk_tokens=128, boundaries="1,3,4,6,7", final_state=POST_NORM)
LAYERS = 61
LISTS = ([2, 30, 58], [1], [1, 2, 3], [2, 16, 29], [1, 5, 60], [4, 9, 17, 33, 60], list(range(1, LAYERS)))
FAMILIES = (
    "LlamaForCausalLM",
    "Qwen2ForCausalLM",
    "Qwen3ForCausalLM",
    "Qwen2MoeForCausalLM",
    "Qwen3MoeForCausalLM",
    "DeepseekV2ForCausalLM",
    "DeepseekV3ForCausalLM",
    "GptOssForCausalLM",
    "KimiK25ForConditionalGeneration",
)


@pytest.mark.parametrize("version", [NEWEST, OLDEST])
def test_every_familys_own_setter_is_led_to_the_boundaries_that_are_wanted(version: str, servers: Servers) -> None:
    environment = servers.environment(version)
    done = subprocess.run(
        [environment.python, HERE / "setters.py", str(LAYERS), json.dumps(LISTS)],
        env=environment.environ(),
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads(done.stdout)
    assert set(found) == set(FAMILIES)
    for family, results in found.items():
        for wanted, result in zip(LISTS, results, strict=True):
            assert result == {"boundaries": wanted, "captured": wanted}, (version, family)


@pytest.fixture(scope="module")
def truth_of() -> Callable[[Path], Truth]:
    """What a checkpoint computes."""
    known: dict[Path, Truth] = {}

    def get(model: Path) -> Truth:
        if model not in known:
            known[model] = Truth(model)
        return known[model]

    return get


@pytest.mark.served(SMOL)
def test_smollm2_in_float32_has_the_states_of_the_named_boundaries(
    server: SglangServer, truth_of: Callable[[Path], Truth]
) -> None:
    card, truth = server.card(), truth_of(server.model)
    assert (card.boundaries, card.final_state, card.layers) == ((2, 15, 27), PRE_NORM, truth.layers)
    for ordinal, ids in enumerate(texts(server.model, (1, 40, 255, 256, 257, 600))):
        assert_right(capture(server, ordinal, ids), truth, tolerance=1e-5, apart=1.0)


@pytest.mark.served(LLAMA_LOGITS)
def test_the_logits_adapter_has_the_same_states(server: SglangServer, truth_of: Callable[[Path], Truth]) -> None:
    card, truth = server.card(), truth_of(server.model)
    assert (card.boundaries, card.final_state, card.layers) == ((2, 4, 5), PRE_NORM, 8)
    for ordinal, ids in enumerate(prompts((1, 40, 127, 128, 129, 500), shared=100)):
        assert_right(capture(server, ordinal, ids), truth, tolerance=1e-5, apart=1.0)


@pytest.mark.served(FIVE)
def test_five_boundaries_of_a_mixture_of_experts_and_its_post_norm_state(
    server: SglangServer, truth_of: Callable[[Path], Truth]
) -> None:
    card, truth = server.card(), truth_of(server.model)
    assert (card.boundaries, card.final_state) == ((1, 3, 4, 6, 7), POST_NORM)
    for ordinal, ids in enumerate(prompts((1, 40, 129, 500), shared=100)):
        captured = capture(server, ordinal, ids)
        assert len(captured.boundaries) == 5
        assert_right(captured, truth, tolerance=1e-5, apart=1.0)


@pytest.mark.served(QWEN3_TP2)
def test_bfloat16_on_two_ranks_rounds_and_keeps_its_boundaries(
    server: SglangServer, truth_of: Callable[[Path], Truth]
) -> None:
    card, truth = server.card(), truth_of(server.model)
    assert (card.boundaries, card.final_state, card.dtype) == ((2, 4, 5), PRE_NORM, "BF16")
    for ordinal, ids in enumerate(prompts((1, 40, 128, 129, 500), shared=100)):
        assert_near(capture(server, ordinal, ids), truth, tolerance=0.05, apart=0.2)


@pytest.mark.parametrize(
    "config",
    [pytest.param(config, marks=pytest.mark.served(config)) for config in (SMOL, LLAMA_LOGITS, FIVE, QWEN3_TP2)],
    ids=lambda config: config.model,
)
def test_the_final_norm_is_published_beside_the_card(config: ServerConfig, server: SglangServer) -> None:
    card = server.card()
    assert card.norm_file == norm_file(card.boot)
    norm = read_norm(server.dump_dir / card.norm_file)
    network = AutoModelForCausalLM.from_pretrained(server.model, dtype=getattr(torch, config.dtype))
    weight = network.model.norm.weight.detach()
    assert norm.eps == AutoConfig.from_pretrained(server.model).rms_norm_eps
    assert torch.equal(torch.frombuffer(bytearray(norm.weight), dtype=weight.dtype), weight)

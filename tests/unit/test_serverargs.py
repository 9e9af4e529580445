from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest

from headrace.dumps import POST_NORM, PRE_NORM
from headrace.serverargs import notes, problems

# What both a server's own record and its /server_info have, with the defaults of SGLang 0.5.23.
DEFAULTS: dict[str, Any] = {
    "model_path": "tiny",
    "device": "cuda",
    "tp_size": 8,
    "pp_size": 1,
    "dp_size": 1,
    "attn_dp_size": 1,
    "attn_cp_size": 1,
    "dcp_size": 1,
    "nnodes": 1,
    "cuda_graph_config": {"decode": {"backend": "full"}, "prefill": {"backend": "disabled"}},
    "speculative_algorithm": None,
    "disaggregation_mode": "null",
    "is_embedding": False,
    "allow_auto_truncate": False,
    "enable_dp_attention": False,
    "enable_prefill_cp": False,
    "startup_weight_load_mode": "serial",
    "load_format": "auto",
    "flashinfer_allreduce_fusion_backend": None,
    "return_aux_hidden_state_layer_ids": None,
    "version": "0.5.23",
}


@dataclass
class Phase:
    backend: str


@dataclass
class Graphs:
    """As a server's own record has it; `/server_info` makes tables of it."""

    decode: Phase
    prefill: Phase


def flags(final_state: str = "", **changes: Any) -> list[str]:
    return [problem.flag for problem in problems({**DEFAULTS, **changes}, final_state=final_state)]


def test_an_ordinary_server_has_no_problem() -> None:
    assert flags() == flags(final_state=PRE_NORM) == []
    assert notes(DEFAULTS) == []


def test_a_server_of_which_hardly_anything_is_known_has_none_either() -> None:
    assert problems({}) == [] and notes({}) == []


@pytest.mark.parametrize(
    ("name", "value", "word"),
    [
        ("pp_size", 2, "--pp-size"),
        ("attn_cp_size", 2, "--attn-cp-size"),
        ("dcp_size", 8, "--dcp-size"),
        ("enable_prefill_cp", True, "--enable-prefill-cp"),
        ("enable_prefill_context_parallel", True, "context parallel"),
        ("enable_dsa_prefill_context_parallel", True, "context parallel"),
        ("enable_layernorm_sp", True, "--enable-layernorm-sp"),
        ("enable_attn_tp_input_scattered", True, "--enable-attn-tp-input-scattered"),
        ("enable_two_batch_overlap", True, "--enable-two-batch-overlap"),
        ("speculative_algorithm", "EAGLE3", "--speculative-algorithm"),
        ("speculative_algorithm", "NGRAM", "--speculative-algorithm"),
        ("return_aux_hidden_state_layer_ids", [1, 2], "--return-aux-hidden-state-layer-ids"),
        ("disaggregation_mode", "prefill", "--disaggregation-mode"),
        ("is_embedding", True, "--is-embedding"),
        ("encoder_only", True, "--encoder-only"),
        ("dllm_algorithm", "LowConfidence", "--dllm-algorithm"),
        ("enable_pdmux", True, "--enable-pdmux"),
        ("allow_auto_truncate", True, "--allow-auto-truncate"),
        ("cuda_graph_config", {"prefill": {"backend": "tc_piecewise"}}, "tc_piecewise"),
        ("cuda_graph_config", Graphs(decode=Phase("full"), prefill=Phase("tc_piecewise")), "tc_piecewise"),
        ("enable_torch_compile", True, "--enable-torch-compile"),
        ("startup_weight_load_mode", "overlap", "--startup-weight-load-mode"),
        ("checkpoint_engine_wait_weights_before_ready", True, "--checkpoint-engine-wait-weights-before-ready"),
        ("enable_memory_saver", True, "--enable-memory-saver"),
        ("enable_nvidia_megakernel", True, "--enable-nvidia-megakernel"),
        ("device", "npu", "--device"),
    ],
)
def test_each_argument_in_the_way_is_named_with_what_to_write_instead(name: str, value: Any, word: str) -> None:
    (problem,) = problems({**DEFAULTS, name: value})
    assert word in problem.flag
    assert str(problem) == f"{problem.flag}: {problem.why}; {problem.change}"
    assert problem.change.startswith(("start ", "serve ", "leave ")) and problem.why


@pytest.mark.parametrize(
    "graphs",
    [{"prefill": {"backend": "breakable"}}, Graphs(decode=Phase("full"), prefill=Phase("full"))],
)
def test_prefill_graphs_are_in_the_way_of_pre_norm_alone(graphs: Any) -> None:
    assert flags(final_state=PRE_NORM, cuda_graph_config=graphs) == ["--cuda-graph-backend-prefill"]
    assert flags(final_state=POST_NORM, cuda_graph_config=graphs) == []
    assert flags(cuda_graph_config=graphs) == []
    assert "--disable-prefill-cuda-graph" in notes({**DEFAULTS, "cuda_graph_config": graphs})[0]


def test_the_flag_that_only_names_a_convention_is_no_draft_model() -> None:
    assert flags(speculative_algorithm="EAGLE3", enable_return_aux_hidden_states=True) == []


@pytest.mark.parametrize(
    ("version", "tp", "backend", "found"),
    [
        ("0.5.16", 8, "auto", True),
        ("0.5.20.post1", 2, "trtllm", True),
        ("0.5.21", 8, "auto", False),
        ("0.6.0", 8, "auto", False),
        ("0.5.16", 1, "auto", False),
        ("0.5.16", 8, None, False),
        ("unknown", 8, "auto", False),
    ],
)
def test_sums_that_are_added_up_late_are_refused_where_sglang_hands_them_out(
    version: str, tp: int, backend: str | None, found: bool
) -> None:
    assert bool(flags(version=version, tp_size=tp, flashinfer_allreduce_fusion_backend=backend)) is found


def test_several_problems_are_all_said() -> None:
    assert len(flags(pp_size=2, enable_pdmux=True, is_embedding=True)) == 3


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"dp_size": 8, "enable_dp_attention": True}, "each rank captures its own requests"),
        ({"attn_dp_size": 8}, "each rank captures its own requests"),
        ({"attn_dp_size": 16, "nnodes": 2}, "lies on the node"),
        ({"load_format": "dummy"}, "random"),
    ],
)
def test_what_is_allowed_and_worth_knowing_is_said(changes: dict[str, Any], word: str) -> None:
    (note,) = notes({**DEFAULTS, **changes})
    assert word in note
    assert problems({**DEFAULTS, **changes}) == []

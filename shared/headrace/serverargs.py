"""What of an SGLang server's arguments is in the way of capture, and what is only worth knowing."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from headrace.dumps import POST_NORM, PRE_NORM

_FIRST_WITH_SUMS = (0, 5, 21)  # since then a layer's sum is complete where it is handed out, whatever is fused


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """A server argument with which capture cannot be right: its `flag`, why, and what to `change`."""

    flag: str
    why: str
    change: str

    def __str__(self) -> str:
        return f"{self.flag}: {self.why}; {self.change}"


Arguments = Mapping[str, Any]


def problems(args: Arguments, *, final_state: str = "") -> list[Problem]:
    """What of the arguments is in the way, empty if nothing is.

    `args` are SGLang's resolved arguments by their names (`ServerArgs`), or `/server_info`, which has them; a name that
    is not there is taken for one that this SGLang does not have. `version` may be among them. `final_state` is the one
    that is captured, where it is known.
    """
    found = [rule.problem for rule in _RULES if rule.applies(args)]
    if final_state == PRE_NORM and _prefill_graph(args) != "disabled":
        found.append(
            Problem(
                flag="--cuda-graph-backend-prefill",
                why="a replayed prefill graph does not pass the final norm's input on",
                change=f"start with --disable-prefill-cuda-graph, or with HEADRACE_CAPTURE_FINAL_STATE={POST_NORM}",
            )
        )
    return found


def notes(args: Arguments) -> list[str]:
    """What is allowed and yet worth knowing, each in a sentence."""
    return [note for applies, note in _NOTES if applies(args)]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Rule:
    applies: Callable[[Arguments], bool]
    problem: Problem


def _rule(applies: Callable[[Arguments], bool], flag: str, why: str, change: str) -> _Rule:
    return _Rule(applies=applies, problem=Problem(flag=flag, why=why, change=change))


def _on(*names: str) -> Callable[[Arguments], bool]:
    return lambda args: any(bool(args.get(name)) for name in names)


def _above(limit: int, *names: str) -> Callable[[Arguments], bool]:
    return lambda args: any(_number(args.get(name)) > limit for name in names)


def _not(name: str, *allowed: object) -> Callable[[Arguments], bool]:
    return lambda args: args.get(name) not in (None, *allowed)


def _number(value: Any) -> int:
    return value if isinstance(value, int) else 0


def _prefill_graph(args: Arguments) -> str:
    """How prefill is captured as graphs; SGLang's own record is an object, and a table where it comes as JSON."""
    config = args.get("cuda_graph_config")
    prefill = config.get("prefill") if isinstance(config, Mapping) else getattr(config, "prefill", None)
    backend = prefill.get("backend") if isinstance(prefill, Mapping) else getattr(prefill, "backend", None)
    return str(backend or "disabled")


def _several_engines(args: Arguments) -> bool:
    return _above(1, "dp_size", "attn_dp_size", "dwdp_size")(args)


def _sums_are_fused(args: Arguments) -> bool:
    numbers = re.match(r"(\d+)\.(\d+)\.(\d+)", str(args.get("version") or ""))
    if numbers is None or tuple(map(int, numbers.groups())) >= _FIRST_WITH_SUMS:
        return False
    fused = args.get("flashinfer_allreduce_fusion_backend") or args.get("enable_aiter_allreduce_fusion")
    return _above(1, "tp_size")(args) and bool(fused)


_RULES = (
    _rule(
        _above(1, "pp_size"),
        "--pp-size",
        "a pipeline stage hands out only the layers that it has",
        "start with --pp-size 1 and a larger --tp-size",
    ),
    _rule(
        lambda args: (
            _above(1, "attn_cp_size", "dcp_size")(args)
            or _on("enable_prefill_cp", "enable_prefill_context_parallel", "enable_dsa_prefill_context_parallel")(args)
        ),
        "context parallel (--attn-cp-size, --dcp-size, --enable-prefill-cp)",
        "a rank has only some of a prompt's rows, in another order",
        "start without it",
    ),
    _rule(
        _on("enable_layernorm_sp", "enable_attn_tp_input_scattered"),
        "--enable-layernorm-sp, --enable-attn-tp-input-scattered",
        "a rank has only some of a prompt's rows",
        "start without it",
    ),
    _rule(
        _on("enable_two_batch_overlap"),
        "--enable-two-batch-overlap",
        "layers of a halved batch are not handed out",
        "start without it",
    ),
    _rule(
        lambda args: bool(args.get("speculative_algorithm")) and not args.get("enable_return_aux_hidden_states"),
        "--speculative-algorithm",
        "a draft model asks the target for layers of its own",
        "start without a draft model (with --enable-return-aux-hidden-states, where SGLang has it, none is loaded)",
    ),
    _rule(
        _on("return_aux_hidden_state_layer_ids"),
        "--return-aux-hidden-state-layer-ids",
        "SGLang would compare its layers with those that headrace sets",
        "leave it out and name the layers in HEADRACE_CAPTURE_BOUNDARIES",
    ),
    _rule(
        _not("disaggregation_mode", "null", ""),
        "--disaggregation-mode",
        "prompts are computed in one server and answered by another",
        "start one server that does both (--disaggregation-mode null)",
    ),
    _rule(
        _on("is_embedding", "encoder_only"),
        "--is-embedding, --encoder-only",
        "such a server has no language model's states",
        "start without it",
    ),
    _rule(
        _on("dllm_algorithm"),
        "--dllm-algorithm",
        "a diffusion model has no one state for a token",
        "serve another model",
    ),
    _rule(
        _on("enable_pdmux"),
        "--enable-pdmux",
        "a prompt's layers are computed in several forwards",
        "start without it",
    ),
    _rule(
        _on("allow_auto_truncate"),
        "--allow-auto-truncate",
        "a prompt that is too long would be cut in silence, and each of its attempts be lost",
        "start without it, so that such a prompt is refused at once",
    ),
    _rule(
        lambda args: _prefill_graph(args) == "tc_piecewise",
        "--cuda-graph-backend-prefill tc_piecewise",
        "a compiled model does not hand its states out",
        "start with --disable-prefill-cuda-graph",
    ),
    _rule(
        _on("enable_torch_compile"),
        "--enable-torch-compile",
        "a compiled model need not call what capture stands on",
        "start without it",
    ),
    _rule(
        _sums_are_fused,
        "--flashinfer-allreduce-fusion-backend (set by SGLang itself for some models)",
        "before SGLang 0.5.21 some models hand out a layer's sum before it was added up over the ranks",
        "start with --enforce-disable-flashinfer-allreduce-fusion, or take SGLang 0.5.21",
    ),
    _rule(
        _not("startup_weight_load_mode", "serial", ""),
        "--startup-weight-load-mode",
        "the weights are not there yet when capture declares them",
        "start with --startup-weight-load-mode serial",
    ),
    _rule(
        _on("checkpoint_engine_wait_weights_before_ready"),
        "--checkpoint-engine-wait-weights-before-ready",
        "the weights are not there yet when capture declares them",
        "start with the weights in --model-path",
    ),
    _rule(
        _on("enable_memory_saver"),
        "--enable-memory-saver",
        "weights that were given back may come back as anything",
        "start without it",
    ),
    _rule(
        _on("enable_nvidia_megakernel", "enable_amd_monokernel"),
        "--enable-nvidia-megakernel, --enable-amd-monokernel",
        "one kernel takes the place of the layers, and hands none of them out",
        "start without it",
    ),
    _rule(
        _not("device", "cuda", "cpu", ""),
        "--device",
        "states are captured from CUDA devices and from CPUs",
        "start on one of them",
    ),
)

_NOTES: tuple[tuple[Callable[[Arguments], bool], str], ...] = (
    (
        lambda args: _prefill_graph(args) != "disabled",
        "prefill graphs are on: the final state can be post_norm, and pre_norm needs --disable-prefill-cuda-graph",
    ),
    (
        lambda args: _several_engines(args) and not _above(1, "nnodes")(args),
        "data parallel: each rank captures its own requests into the same folder, with a buffer of its own",
    ),
    (
        lambda args: _several_engines(args) and _above(1, "nnodes")(args),
        "data parallel over nodes: a dump lies on the node whose rank computed it, so each needs watcher and writers",
    ),
    (
        lambda args: args.get("load_format") == "dummy",
        "--load-format dummy: the weights are random, and so is what is captured",
    ),
)

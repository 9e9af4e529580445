"""Sets boundaries on the real model classes of the SGLang in this interpreter, and prints what each then captures.

Run as a script: `setters.py LAYERS BOUNDARIES`, the latter as JSON: a list of lists. The classes are real, and called
by the plugin's own function; the objects are hollow: they have no weights, and of their configuration the number of
layers only. Prints a JSON object with an entry a list for each class: the `boundaries` that the plugin read back, and
those that are `captured` by what the model's forward looks at.
"""

from __future__ import annotations

import json
import sys
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import torchvision_schemas  # noqa: F401  (before transformers)
from torch import nn

# Module, class, and the class of its decoder; a wrapper has none, and the class that it wraps.
_FAMILIES = (
    ("llama", "LlamaForCausalLM", "LlamaModel"),
    ("qwen2", "Qwen2ForCausalLM", "Qwen2Model"),
    ("qwen3", "Qwen3ForCausalLM", "Qwen3Model"),
    ("qwen2_moe", "Qwen2MoeForCausalLM", "Qwen2MoeModel"),
    ("qwen3_moe", "Qwen3MoeForCausalLM", "Qwen3MoeModel"),
    ("deepseek_v2", "DeepseekV2ForCausalLM", "DeepseekV2Model"),
    ("deepseek_v2", "DeepseekV3ForCausalLM", "DeepseekV2Model"),
    ("gpt_oss", "GptOssForCausalLM", "GptOssModel"),
)
_BY_FLAG = ("qwen2_moe", "qwen3_moe")  # their layers carry a flag each, and the list is not looked at


def main() -> None:
    """Print the object."""
    layers, wanted = int(sys.argv[1]), json.loads(sys.argv[2])
    found: dict[str, list[dict[str, list[int]]]] = {}
    for module, outer, inner in _FAMILIES:
        found[outer] = [_set(_model(module, outer, inner, layers), module, boundaries) for boundaries in wanted]
    found["KimiK25ForConditionalGeneration"] = [_set(_kimi(layers), "deepseek_v2", boundaries) for boundaries in wanted]
    print(json.dumps(found))  # noqa: T201


def _set(model: Any, module: str, boundaries: list[int]) -> dict[str, list[int]]:
    from headrace_capture.plugin.boundaries import set_boundaries

    # What SGLang itself does before, with its own flag for auxiliary states: the three of EAGLE-3.
    model.set_eagle3_layers_to_capture(None)
    read = set_boundaries(model, tuple(boundaries))
    return {"boundaries": list(read), "captured": _captured(getattr(model, "language_model", model), module)}


def _captured(model: Any, module: str) -> list[int]:
    """The layers whose input the decoder's forward would keep; none if the model would throw them away."""
    if not model.capture_aux_hidden_states:
        return []
    if module in _BY_FLAG:
        return [i for i, layer in enumerate(model.model.layers) if getattr(layer, "_is_layer_to_capture", False)]
    return [i for i in range(len(model.model.layers)) if i in model.model.layers_to_capture]


def _model(module: str, outer: str, inner: str, layers: int) -> Any:
    classes = import_module(f"sglang.srt.models.{module}")
    model, decoder = _hollow(getattr(classes, outer)), _hollow(getattr(classes, inner))
    decoder.layers = nn.ModuleList(nn.Module() for _ in range(layers))
    decoder.layers_to_capture = []
    decoder.start_layer, decoder.end_layer = 0, layers
    model.model = decoder
    model.config = decoder.config = SimpleNamespace(num_hidden_layers=layers)
    model.pp_group = decoder.pp_group = SimpleNamespace(is_first_rank=True, is_last_rank=True)
    model.capture_aux_hidden_states = False
    return model


def _kimi(layers: int) -> Any:
    wrapper = _hollow(import_module("sglang.srt.models.kimi_k25").KimiK25ForConditionalGeneration)
    wrapper.language_model = _model("deepseek_v2", "DeepseekV3ForCausalLM", "DeepseekV2Model", layers)
    wrapper.config = SimpleNamespace(text_config=wrapper.language_model.config)
    return wrapper


def _hollow(kind: type[nn.Module]) -> Any:
    made = kind.__new__(kind)
    nn.Module.__init__(made)
    return made


if __name__ == "__main__":
    main()

"""The reference forward: transformers in float32 on the CPU, each boundary seen as the layer itself is given it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from headrace.errors import UsageError
from headrace.runs import RunSpec

POST_NORM = -1
Visit = Callable[[int, Tensor], None]


class Reference:
    """A checkpoint's decoder in float32. Shares no code with any engine: its hooks are its own."""

    def __init__(self, folder: Path, spec: RunSpec) -> None:
        """Load a checkpoint that fits a run; no code of it is run.

        Raises:
            UsageError: it cannot be loaded, or is of another size than the run's model.
        """
        # The bars would run through that of the verification.
        transformers.utils.logging.disable_progress_bar()  # type: ignore[no-untyped-call]
        try:
            config = AutoConfig.from_pretrained(folder, local_files_only=True)
            text: Any = config.get_text_config()
            _check_size(folder, text, spec)
            answer: Any = AutoModelForCausalLM.from_pretrained(
                folder, config=config, dtype=torch.float32, local_files_only=True, output_loading_info=True
            )
            model, loaded = answer
            if loaded["missing_keys"]:  # transformers would have made them up
                raise ValueError(f"it lacks weights: {', '.join(sorted(loaded['missing_keys'])[:3])}")
            self._decoder = model.eval().get_decoder()
            layers, norm = list(self._decoder.layers), self._decoder.norm
        except (OSError, ValueError, KeyError, AttributeError, ImportError, RuntimeError, SafetensorError) as error:
            first = str(error).strip().partition("\n")[0]
            raise UsageError(f"{folder} cannot be used: {first}; give another --model, or --sample 0") from error
        self.layers = len(layers)
        self._vocabulary = int(text.vocab_size)
        self._visit: Visit | None = None
        for boundary, module in enumerate([*layers, norm]):
            module.register_forward_pre_hook(self._entering(boundary), with_kwargs=True)
        norm.register_forward_hook(self._leaving)

    @torch.inference_mode()
    def run(self, token_ids: Sequence[int], visit: Visit) -> None:
        """Compute N tokens in one forward; `visit` is given each boundary b in 0 to L with its states [N, D] in
        float32, and at last `POST_NORM` with the final norm's output.

        Raises:
            UsageError: a token id is beyond the model's vocabulary.
        """
        largest = max(token_ids)
        if largest >= self._vocabulary:
            raise UsageError(f"token id {largest} is beyond the model's {self._vocabulary}; give the run's --model")
        self._visit = visit
        try:
            self._decoder(input_ids=torch.tensor([token_ids]), use_cache=False)
        finally:
            self._visit = None

    def _entering(self, boundary: int) -> Any:
        def hook(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            states: Tensor = args[0] if args else kwargs["hidden_states"]
            self._see(boundary, states)

        return hook

    def _leaving(self, _module: nn.Module, _args: tuple[Any, ...], output: Tensor) -> None:
        self._see(POST_NORM, output)

    def _see(self, boundary: int, states: Tensor) -> None:
        if self._visit is not None:
            self._visit(boundary, states[0])


def _check_size(folder: Path, config: Any, spec: RunSpec) -> None:
    layers, hidden = int(config.num_hidden_layers), int(config.hidden_size)
    if hidden != spec.hidden_size or max(spec.boundaries) > layers:
        raise UsageError(
            f"{folder} has {layers} layers of width {hidden}; the run has boundaries {list(spec.boundaries)} of width "
            f"{spec.hidden_size}; give the run's --model"
        )

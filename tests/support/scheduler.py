"""What SGLang does with the plugin's hooks, without SGLang: a model, a runner, batches, and the order of the calls."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from headrace_capture.config import CaptureConfig
from headrace_capture.plugin import seams
from headrace_capture.plugin.facts import Server
from headrace_capture.plugin.session import Session
from headrace_capture.plugin.settings import PluginSettings
from headrace_capture.plugin.start import hooks
from tests.support.capture import BOUNDARIES, HIDDEN, WEIGHTS, Prompt, forward_of

LAYERS = 8
_UPDATE = f"{seams.UPDATER}.update_weights_from_disk"


class RMSNorm(nn.Module):
    """A norm as SGLang calls it: with a residual it returns the sum, too."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(HIDDEN, dtype=torch.bfloat16), requires_grad=False)
        self.variance_epsilon = 1e-5

    def forward(self, states: torch.Tensor, residual: torch.Tensor | None = None) -> Any:
        """Scaled, not normed: a test wants to know the numbers."""
        if residual is None:
            return states * 2
        return (states + residual) * 2, states + residual


class Decoder(nn.Module):
    """The layers, of which nothing is needed but that they are there."""

    def __init__(self, layers: int = LAYERS) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Module() for _ in range(layers))
        self.norm = RMSNorm()
        self.layers_to_capture: list[int] = []


class Model(nn.Module):
    """A language model whose setter names layers by their outputs, as most do."""

    def __init__(self) -> None:
        super().__init__()
        self.model = Decoder()
        self.capture_aux_hidden_states = False

    def set_eagle3_layers_to_capture(self, layer_ids: list[int] | None = None) -> None:
        """SGLang's own numbering."""
        self.capture_aux_hidden_states = True
        self.model.layers_to_capture = [2, LAYERS // 2, LAYERS - 3] if layer_ids is None else [i + 1 for i in layer_ids]


def runner_of(model: nn.Module, **changes: Any) -> Any:
    """A model runner whose model is loaded."""
    config = SimpleNamespace(num_hidden_layers=LAYERS, hidden_size=HIDDEN, is_generation=True)
    facts: dict[str, Any] = {
        "model": model,
        "model_config": config,
        "dtype": torch.bfloat16,
        "device": "cpu",
        "gpu_id": 0,
        "is_draft_worker": False,
    }
    return SimpleNamespace(**{**facts, **changes})


def server_of(*, native: bool, captures: bool = True, arguments: Mapping[str, Any] | None = None) -> Server:
    """What a server says of itself."""
    return Server(
        arguments={"device": "cpu", "pp_size": 1, **(arguments or {})},
        model="tiny",
        fingerprint="sglang 0.0.0 tiny bfloat16 tp1",
        weight_version=WEIGHTS,
        captures=captures,
        native=native,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One batch: its kind, what it computes, and what goes unlike the usual way.

    `prompts` overrides a request's prompt length, as for a stub; of `refused` requests SGLang computes a stub and says
    so. Without `norm` or `logits` the forward does not call them, as a replayed graph does. `packed` hands the
    boundaries out as one tensor, `before_norm` the norm's input to the logits processor. Without `residual` the norm is
    given the sum.
    """

    rows: Sequence[tuple[Prompt, int, int]]
    mode: str = "EXTEND"
    decode: Sequence[Prompt] = ()
    padding: int = 0
    prompts: Mapping[str, int] | None = None
    refused: Sequence[Prompt] = ()
    norm: bool = True
    logits: bool = True
    packed: bool = False
    before_norm: bool = False
    residual: bool = True


class Scheduler:
    """Calls the hooks of a session as the scheduler's process of SGLang does."""

    def __init__(
        self,
        folder: Path,
        *,
        native: bool,
        captures: bool = True,
        boundaries: tuple[int, ...] = BOUNDARIES,
        final_state: str = "",
        arguments: Mapping[str, Any] | None = None,
    ) -> None:
        capture = CaptureConfig(dump_dir=folder, buffer_bytes=1 << 20, writers=2, max_wait_seconds=5.0)
        self.session = Session(PluginSettings(capture=capture, boundaries=boundaries, final_state=final_state))
        self.native = native
        self.model = Model()
        self.runner = runner_of(self.model)
        self.server = server_of(native=native, captures=captures, arguments=arguments)
        self._hooks = {target: hook for target, hook, _ in hooks(self.session, lambda _: self.server, (_UPDATE,))}

    def load(self) -> None:
        """The model is loaded, and SGLang, where it was told to, chooses layers of its own."""
        self._hooks[seams.LOAD_MODEL](None, self.runner)
        if self.native:
            self.model.set_eagle3_layers_to_capture(None)
        self.get_ready()

    def get_ready(self) -> None:
        """The attention backends are there: the last thing before graphs are captured."""
        self._hooks[seams.INIT_BACKENDS](None, self.runner)

    def run(self, step: Step, during: Callable[[], None] = lambda: None) -> Any:
        """Run a batch to its end; returns the forward's output, which answers are made of."""
        requests = [
            SimpleNamespace(
                rid=p.rid,
                origin_input_ids=[0] * (step.prompts or {}).get(p.rid, p.tokens),
                to_finish="refused" if any(p is one for one in step.refused) else None,
            )
            for p in [*(p for p, _, _ in step.rows), *step.decode]
        ]
        batch = SimpleNamespace(forward_mode=SimpleNamespace(name=step.mode), reqs=requests)

        def run_batch(_scheduler: Any, _batch: Any) -> Any:
            during()
            return self.forward(self.runner, step)

        output: Any = self._hooks[seams.RUN_BATCH](run_batch, None, batch)
        assert self.capture is None or self.capture.flush(30)
        return output

    def forward(self, runner: Any, step: Step, *, dummy: bool = False) -> Any:
        """A forward of a runner; a dummy one is of no request, as for warm-ups and graph captures."""
        computed = forward_of(step.rows, decode=step.decode, padding=step.padding)
        batch = SimpleNamespace(
            forward_mode=SimpleNamespace(name=step.mode),
            rids=None if dummy else [piece.rid for piece in computed.pieces],
            extend_prefix_lens_cpu=[piece.prefix for piece in computed.pieces],
            extend_seq_lens_cpu=[piece.rows for piece in computed.pieces],
            input_ids=computed.token_ids,
        )

        def original(_runner: Any, _batch: Any) -> Any:
            return SimpleNamespace(logits_output=self._compute(computed, step))

        return self._hooks[seams.FORWARD](original, runner, batch).logits_output

    def abort(self, rid: str = "", *, abort_all: bool = False) -> None:
        self._hooks[seams.ABORT](None, None, SimpleNamespace(rid=rid, abort_all=abort_all))
        assert self.capture is None or self.capture.flush(30)

    def is_of_a_request(self, field: str) -> Any:
        """What the hook changes of SGLang's answer to whether a field of answers is; None where it is left as it is."""
        return self._hooks[seams.ANSWER_FIELD](False, None, field)

    def update_weights(self) -> None:
        self._hooks[_UPDATE](None, "a path")

    @property
    def capture(self) -> Any:
        return self.session.capture

    def _compute(self, computed: Any, step: Step) -> Any:
        output = SimpleNamespace(hidden_states=None, last_hidden_states=None, customized_info=None)
        post_norm = computed.final * 2
        if step.norm:
            zeros = torch.zeros_like(computed.final)
            self.model.model.norm(*((zeros, computed.final) if step.residual else (computed.final,)))
        aux = torch.cat(computed.boundaries, dim=1) if step.packed else list(computed.boundaries)
        if step.logits:
            before_norm = computed.final if step.before_norm else None
            self._hooks[seams.LOGITS](None, computed.token_ids, post_norm, None, None, aux, before_norm)
            if self.native:
                output.hidden_states = torch.cat(computed.boundaries, dim=1) if before_norm is None else before_norm
                output.last_hidden_states = post_norm
        return output

"""Makes a loaded model ready for capture: checks the server, sets the layers, finds the final norm, opens the core."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from headrace import serverargs
from headrace.boundaries import resolve_boundaries
from headrace.dumps import POST_NORM, PRE_NORM
from headrace.errors import UsageError
from headrace_capture.core import Capture
from headrace_capture.plugin.boundaries import set_boundaries
from headrace_capture.plugin.facts import Server, forward_rows
from headrace_capture.plugin.finalnorm import DeclaredNorm, FinalNormModule, PreNormTap, find_final_norm
from headrace_capture.plugin.settings import FINAL_STATE, PluginSettings
from headrace_capture.plugin.states import AuxiliaryOutput, LogitsInput, StateSource

logger = logging.getLogger("headrace.capture")


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """The model that is captured, by its `runner`, and what captures it.

    `capture` is None on the ranks that hold the same rows as another one, which captures them; `tap` is None where the
    final state is post-norm, and `norm` where the model's was not found.
    """

    runner: Any
    boundaries: tuple[int, ...]
    capture: Capture | None
    source: StateSource
    tap: PreNormTap | None
    norm: DeclaredNorm | None


def open_target(settings: PluginSettings, runner: Any, server: Server, wanted: Callable[[], bool]) -> Target:
    """Make the runner's model ready; on the rank that captures, open the core and declare the engine.

    To be called before SGLang sizes its KV cache by the memory that is left. `wanted` says during a forward whether its
    states are. Nothing of the model is changed before the server's arguments were found to allow it.

    Raises:
        UsageError: the server's arguments, the model or the dump folder do not allow capture.
    """
    config = runner.model_config
    norm = find_final_norm(runner.model)
    final_state = _final_state(settings, norm, runner.model)
    if found := serverargs.problems(server.arguments, final_state=final_state):
        raise UsageError("; ".join(map(str, found)))
    if not getattr(config, "is_generation", True):
        raise UsageError(f"{type(runner.model).__name__} is served for embeddings; serve a language model")
    asked = resolve_boundaries(settings.boundaries, config.num_hidden_layers)
    boundaries = set_boundaries(runner.model, asked)
    source = AuxiliaryOutput() if server.native else LogitsInput()
    if not server.captures:
        return Target(runner=runner, boundaries=boundaries, capture=None, source=source, tap=None, norm=None)
    declared = None if norm is None else DeclaredNorm(norm)
    tap = PreNormTap(norm.module, wanted) if norm is not None and final_state == PRE_NORM else None
    capture = Capture(  # last: once it is open, the engine has declared itself
        settings.capture,
        model=server.model,
        fingerprint=server.fingerprint,
        weight_version=server.weight_version,
        boundaries=boundaries,
        final_state=final_state,
        layers=config.num_hidden_layers,
        hidden_size=config.hidden_size,
        dtype=runner.dtype,
        norm_weight=None if norm is None else norm.weight,
        norm_eps=0.0 if norm is None else norm.eps,
        forward_rows=forward_rows(server.arguments),
        device=torch.device("cuda", runner.gpu_id) if runner.device == "cuda" else runner.device,
    )
    logger.info(
        "headrace captures into %s: boundaries %s, %s, from SGLang's %s, boot %s, %s",
        settings.capture.dump_dir,
        list(boundaries),
        final_state,
        source.name,
        capture.boot,
        server.fingerprint,
    )
    return Target(
        runner=runner,
        boundaries=boundaries,
        capture=capture,
        source=source,
        tap=tap,
        norm=declared,
    )


def _final_state(settings: PluginSettings, norm: FinalNormModule | None, model: Any) -> str:
    if norm is None and settings.final_state == PRE_NORM:
        raise UsageError(
            f"{type(model).__name__}'s final norm is not where models have it, so its input cannot be captured; "
            f"set {FINAL_STATE}={POST_NORM}"
        )
    return settings.final_state or (POST_NORM if norm is None else PRE_NORM)

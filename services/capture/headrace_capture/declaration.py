"""What an engine says of itself: the card, the final norm, and what is the same in each of its dumps."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from headrace.boundaries import resolve_boundaries
from headrace.dumps import ENGINE_FILE, POST_NORM, PRE_NORM, EngineCard, encode_json
from headrace.errors import UsageError
from headrace.finalnorm import FinalNorm, norm_file, with_norm
from headrace_capture.dumpfile import EngineFacts
from headrace_capture.rows import DTYPES


@dataclass(frozen=True, slots=True, kw_only=True)
class Declaration:
    """`facts` are in each dump; `files`, by name, are put into the dump folder in their order, the card last."""

    facts: EngineFacts
    files: Mapping[str, bytes]


def declare(
    boot: str,
    *,
    model: str,
    fingerprint: str,
    weight_version: str,
    boundaries: tuple[int, ...],
    final_state: str,
    layers: int,
    hidden_size: int,
    dtype: torch.dtype,
    norm_weight: torch.Tensor | None,
    norm_eps: float,
) -> Declaration:
    """Make a boot's declaration; the arguments are those of `Capture`.

    Raises:
        UsageError: an argument contradicts the others.
    """
    if dtype not in DTYPES:
        raise UsageError(f"states of {dtype} cannot be captured; serve the model in bfloat16, float16 or float32")
    if final_state not in (PRE_NORM, POST_NORM):
        raise UsageError(f"final state {final_state!r}: it is {PRE_NORM} or {POST_NORM}")
    boundaries = resolve_boundaries(boundaries, layers)
    norm = None if norm_weight is None else _norm(norm_weight, norm_eps, hidden_size)
    # In each dump, too: a row is made with the norm of the boot that its dump is of, and with no other.
    fingerprint = with_norm(fingerprint, norm)
    facts = EngineFacts(
        model=model,
        fingerprint=fingerprint,
        boundaries=boundaries,
        final_state=final_state,
        hidden_size=hidden_size,
        dtype=dtype,
    )
    card = EngineCard(
        boot=boot,
        model=model,
        fingerprint=fingerprint,
        weight_version=weight_version,
        boundaries=boundaries,
        final_state=final_state,
        layers=layers,
        hidden_size=hidden_size,
        dtype=DTYPES[dtype],
        norm_file="" if norm is None else norm_file(boot),
    )
    files = {} if norm is None else {card.norm_file: norm.encode()}
    return Declaration(facts=facts, files={**files, ENGINE_FILE: encode_json(card)})


def _norm(weight: torch.Tensor, eps: float, hidden_size: int) -> FinalNorm:
    values = weight.detach().to("cpu").contiguous()
    if values.dtype not in DTYPES or tuple(values.shape) != (hidden_size,):
        raise UsageError(f"the final norm's weight is {values.dtype} {list(values.shape)}, expected [{hidden_size}]")
    return FinalNorm(
        dtype=DTYPES[values.dtype],
        hidden_size=hidden_size,
        weight=bytes(values.view(torch.uint8).tolist()),
        eps=eps,
    )

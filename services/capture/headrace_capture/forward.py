"""What an engine hands over after a forward."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """One request's rows in one forward.

    `rid` is any id, only ids of ours are captured; `prompt_tokens` is the real prompt's length; `prefix` counts the
    request's rows that came before this forward (earlier chunks, or a prefix-cache hit); `rows` are this forward's.
    A decode row has `prefix >= prompt_tokens`.
    """

    rid: str
    prompt_tokens: int
    prefix: int
    rows: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Forward:
    """One forward's states.

    The rows of `pieces`, in order, are the first rows of the tensors; rows beyond are padding. `token_ids` is [T] of
    an integer dtype, `boundaries` are k tensors [T, D], low to high, or one tensor [T, k*D] in which they lie side by
    side, `final` is [T, D]; all lie on one device, and are ready in the caller's current stream.
    """

    pieces: tuple[Piece, ...]
    token_ids: torch.Tensor
    boundaries: tuple[torch.Tensor, ...]
    final: torch.Tensor
    weight_version: str

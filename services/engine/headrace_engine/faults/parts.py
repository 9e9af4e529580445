"""One request's rows of a forward, cut and changed: what a faulty server would hand to the capture."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch

from headrace_capture.forward import Forward, Piece
from headrace_engine.faults.plan import Kind


def rows_of(forward: Forward, source: int, *pieces: Piece) -> Forward:
    """The rows of adjacent pieces, the first of which begins at the forward's row `source`."""
    rows = slice(source, source + sum(piece.rows for piece in pieces))
    return replace(
        forward,
        pieces=pieces,
        token_ids=forward.token_ids[rows],
        boundaries=tuple(state[rows] for state in forward.boundaries),
        final=forward.final[rows],
    )


def clip(part: Forward, begin: int, end: int) -> tuple[Forward, ...]:
    """What a part, a forward of one piece, has of the prompt's rows [begin, end): a forward, or nothing."""
    piece = part.pieces[0]
    first, last = max(begin, piece.prefix), min(end, piece.prefix + piece.rows)
    if first >= last:
        return ()
    return (rows_of(part, first - piece.prefix, replace(piece, prefix=first, rows=last - first)),)


def ends_at(part: Forward, row: int) -> bool:
    """Whether the part's last row is the one before the prompt's row `row`."""
    return part.pieces[0].prefix + part.pieces[0].rows == row


def with_states_of(part: Forward, other: Forward) -> Forward:
    """The part's token ids with the states of another prompt's rows, repeated as often as needed."""
    piece = part.pieces[0]
    rows = (torch.arange(piece.rows) + piece.prefix) % len(other.final)
    return replace(part, boundaries=tuple(state[rows] for state in other.boundaries), final=other.final[rows])


def _prefix_hit(part: Forward) -> Iterable[Forward]:
    tokens = part.pieces[0].prompt_tokens
    yield from clip(part, tokens // 2, tokens)


def _lost_part(part: Forward) -> Iterable[Forward]:
    tokens = part.pieces[0].prompt_tokens
    yield from clip(part, 0, tokens // 3)
    yield from clip(part, 2 * tokens // 3, tokens)


def _repeated_part(part: Forward) -> Iterable[Forward]:
    tokens = part.pieces[0].prompt_tokens
    for first in clip(part, 0, tokens // 2):
        yield first
        if ends_at(first, tokens // 2):
            yield first
    yield from clip(part, tokens // 2, tokens)


def _weights_mid_prompt(part: Forward) -> Iterable[Forward]:
    tokens = part.pieces[0].prompt_tokens
    yield from clip(part, 0, tokens // 2)
    for rest in clip(part, tokens // 2, tokens):
        yield from _other_weights(rest)


def _other_weights(part: Forward) -> Iterable[Forward]:
    yield replace(part, weight_version=f"{part.weight_version} (other)")


def _other_tokens(part: Forward) -> Iterable[Forward]:
    changed = part.token_ids.clone()
    changed[_middle(part)] += 1
    yield replace(part, token_ids=changed)


def _swapped_boundaries(part: Forward) -> Iterable[Forward]:
    first, second, *others = (*part.boundaries, part.final)  # of a single boundary: with the final state
    states = (second, first, *others)
    yield replace(part, boundaries=states[:-1], final=states[-1])


def _nan(part: Forward) -> Iterable[Forward]:
    state = part.boundaries[0].clone()
    state[_middle(part), :1] = torch.nan
    yield replace(part, boundaries=(state, *part.boundaries[1:]))


def _zero_row(part: Forward) -> Iterable[Forward]:
    state = part.boundaries[0].clone()
    state[_middle(part)] = 0
    yield replace(part, boundaries=(state, *part.boundaries[1:]))


def _no_memory(part: Forward) -> Iterable[Forward]:
    yield replace(part, final=part.final.as_subclass(_NoMemory))


def _capture_fault(part: Forward) -> Iterable[Forward]:
    yield replace(part, final=part.final.as_subclass(_Broken))


def _escaping_id(part: Forward) -> Iterable[Forward]:
    yield replace(part, pieces=tuple(replace(piece, rid=f"../../{piece.rid}") for piece in part.pieces))


def _withheld(_part: Forward) -> Iterable[Forward]:
    return ()


def _middle(part: Forward) -> slice:
    """The prompt's middle row as it lies in the part; empty when it lies in another."""
    piece = part.pieces[0]
    row = piece.prompt_tokens // 2 - piece.prefix
    return slice(row, row + 1) if 0 <= row < piece.rows else slice(0, 0)


class _NoMemory(torch.Tensor):
    """States that cannot be gathered for want of memory."""

    def __getitem__(self, _rows: Any) -> Any:
        raise torch.OutOfMemoryError("out of memory (a provoked fault)")


class _Broken(torch.Tensor):
    """States that cannot be read."""

    def __getitem__(self, _rows: Any) -> Any:
        raise RuntimeError("an illegal memory access was encountered (a provoked fault)")


# What becomes of each part of a request whose fault needs no memory of the parts before.
CHANGES: Mapping[Kind, Callable[[Forward], Iterable[Forward]]] = {
    Kind.PREFIX_HIT: _prefix_hit,
    Kind.LOST_PART: _lost_part,
    Kind.REPEATED_PART: _repeated_part,
    Kind.WEIGHTS_MID_PROMPT: _weights_mid_prompt,
    Kind.OTHER_WEIGHTS: _other_weights,
    Kind.OTHER_TOKENS: _other_tokens,
    Kind.SWAPPED_BOUNDARIES: _swapped_boundaries,
    Kind.NAN: _nan,
    Kind.ZERO_ROW: _zero_row,
    Kind.NO_MEMORY: _no_memory,
    Kind.CAPTURE_FAULT: _capture_fault,
    Kind.ESCAPING_ID: _escaping_id,
    Kind.WITHHELD: _withheld,
}

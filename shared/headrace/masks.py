"""Loss masks as run lengths: a few integers instead of one per token."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby

from headrace.errors import UsageError


def encode_mask(mask: Iterable[int]) -> tuple[int, ...]:
    """Encode a mask of 0 and 1 as the lengths of its alternating runs, the first one of zeros.

    `[1, 1, 0]` is `(0, 2, 1)`: no zeros, two ones, one zero.

    Raises:
        UsageError: a value is neither 0 nor 1.
    """
    lengths: list[int] = []
    expected = 0
    for value, run in groupby(mask):
        if value not in (0, 1):
            raise UsageError(f"a loss mask holds 0 and 1, not {value!r}")
        if value != expected:
            lengths.append(0)
        lengths.append(sum(1 for _ in run))
        expected = 1 - value
    return tuple(lengths)


def decode_mask(lengths: Sequence[int]) -> bytes:
    """Decode run lengths into one byte (0 or 1) per token."""
    return b"".join(bytes([index % 2]) * length for index, length in enumerate(lengths))


def mask_length(lengths: Sequence[int]) -> int:
    """Tokens that the mask covers."""
    return sum(lengths)


def trained_tokens(lengths: Sequence[int]) -> int:
    """Tokens whose mask is 1."""
    return sum(lengths[1::2])

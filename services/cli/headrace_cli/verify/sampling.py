"""Chooses rows to recompute: spread over lengths and ordinals, and the same ones each time."""

from __future__ import annotations

from collections.abc import Sequence

# Multiples of the golden ratio's fraction fill [0, 1) evenly, however many are taken.
_GOLDEN = 0.6180339887498949


def choose(rows: Sequence[tuple[int, int]], count: int) -> list[int]:
    """Choose `count` of rows given as (ordinal, tokens), all if there are fewer; the ordinals ascend.

    Sorted by length the rows fall into `count` equal parts; of each part the row is taken whose ordinal is nearest
    to a place that moves over the dataset from part to part.
    """
    if count >= len(rows):
        return sorted(ordinal for ordinal, _ in rows)
    by_length = sorted(rows, key=lambda row: (row[1], row[0]))
    reach = max(ordinal for ordinal, _ in rows) + 1
    chosen = []
    for index in range(count):
        part = by_length[index * len(rows) // count : (index + 1) * len(rows) // count]
        target = (0.5 + index * _GOLDEN) % 1 * reach
        chosen.append(min(part, key=lambda row: (abs(row[0] - target), row[0]))[0])
    return sorted(chosen)

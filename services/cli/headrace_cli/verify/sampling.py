"""Chooses rows to recompute: spread over lengths and ordinals, and the same ones each time."""

from __future__ import annotations

from array import array

import numpy as np

# Multiples of the golden ratio's fraction fill [0, 1) evenly, however many are taken.
_GOLDEN = 0.6180339887498949


def choose(tokens: array[int], count: int) -> list[int]:
    """Choose `count` rows, all if there are fewer; `tokens` has each ordinal's length, 0 where there is no row.

    Sorted by length the rows fall into `count` equal parts; of each part the row is taken whose ordinal is nearest
    to a place that moves over the dataset from part to part. The ordinals that are returned ascend.
    """
    lengths = np.asarray(tokens)
    rows = np.flatnonzero(lengths)
    if count >= len(rows):
        return [int(ordinal) for ordinal in rows]
    by_length = rows[np.argsort(lengths[rows], kind="stable")]
    reach = int(rows[-1]) + 1
    chosen = []
    for index in range(count):
        part = np.sort(by_length[index * len(rows) // count : (index + 1) * len(rows) // count])
        target = (0.5 + index * _GOLDEN) % 1 * reach
        chosen.append(int(part[np.abs(part - target).argmin()]))
    return sorted(chosen)

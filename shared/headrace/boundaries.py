"""Which boundaries of a model are meant: boundary b is the residual stream entering layer b."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from headrace.errors import UsageError

EAGLE3 = "eagle3"


def resolve_boundaries(asked: str | Sequence[int], layers: int) -> tuple[int, ...]:
    """The boundaries for a model of `layers` decoder layers, ascending; b = `layers` is the final norm's input.

    `asked` is `eagle3` (2, L//2, L-3, as SGLang's default) or a list.

    Raises:
        UsageError: they do not ascend, one is outside 0 to `layers`, or the model is too small for `eagle3`.
    """
    if isinstance(asked, str):
        if asked != EAGLE3:
            raise UsageError(f"boundaries {asked!r}: write {EAGLE3}, or a list of numbers")
        if not 2 < layers // 2 < layers - 3:
            raise UsageError(f"boundaries {EAGLE3!r}: the model has only {layers} layers; give a list of boundaries")
        return 2, layers // 2, layers - 3
    check_ascending(asked)
    if outside := [boundary for boundary in asked if boundary > layers]:
        raise UsageError(
            f"boundaries {list(asked)}: {outside[0]} is outside 0 to {layers}, the model's layers; mend the list"
        )
    return tuple(asked)


def check_ascending(boundaries: Sequence[int]) -> None:
    """Raise UsageError unless they are at least one, from 0 on, ascending, none twice."""
    ascending = all(low < high for low, high in pairwise(boundaries))
    if not boundaries or boundaries[0] < 0 or not ascending:
        raise UsageError(f"boundaries {list(boundaries)}: give ascending boundaries from 0, none twice")

"""The names of the dataset formats and what each is made from; the writer has their code, a submit only needs this."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from headrace.dumps import POST_NORM, PRE_NORM


@dataclass(frozen=True, slots=True, kw_only=True)
class FormatNeeds:
    """What a format's rows are made from.

    `takes` are the captured final states that will do: what is post-norm cannot be turned back into pre-norm.
    `stores` is the final state that a row holds, empty where it is the captured one. `boundaries` is how many there
    must be, 0 for any number.
    """

    takes: frozenset[str]
    stores: str = ""
    boundaries: int = 0


_BOTH = frozenset({PRE_NORM, POST_NORM})

# By the name that run files use.
FORMATS: Mapping[str, FormatNeeds] = MappingProxyType(
    {
        "headrace": FormatNeeds(takes=_BOTH),
        # EAGLE-3: the three boundaries that its draft model is built for.
        "specforge": FormatNeeds(takes=_BOTH, stores=POST_NORM, boundaries=3),
    }
)

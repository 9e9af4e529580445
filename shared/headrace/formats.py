"""The names of the dataset formats and what each is made from; the writer has their code, a submit only needs this."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from headrace.dumps import POST_NORM, PRE_NORM

# A format's name, as run files spell it -> the captured final states that its rows can be made from. What is
# post-norm cannot be turned back into pre-norm, so a format that needs the latter does not take the former.
FORMATS: Mapping[str, frozenset[str]] = MappingProxyType({"headrace": frozenset({PRE_NORM, POST_NORM})})

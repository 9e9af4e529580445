"""Names the known word that a wrong one was probably meant to be."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def nearest(word: str, known: Iterable[str]) -> str | None:
    """The known word that is nearest; None when none is near."""
    return next(iter(difflib.get_close_matches(word, known, n=1, cutoff=0.5)), None)


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """A phrase to put behind a message, empty when no known word is near."""
    near = nearest(word, known)
    return f"; did you mean {near!r}?" if near else ""

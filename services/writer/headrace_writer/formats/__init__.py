"""The dataset formats by name."""

from __future__ import annotations

from difflib import get_close_matches

from headrace.errors import UsageError
from headrace_writer.formats.base import Format
from headrace_writer.formats.headrace import HeadraceFormat

_FORMATS: dict[str, Format] = {form.name: form for form in (HeadraceFormat(),)}


def names() -> tuple[str, ...]:
    """The names that a run file may use, sorted."""
    return tuple(sorted(_FORMATS))


def get(name: str) -> Format:
    """Look a format up.

    Raises:
        UsageError: no format has this name.
    """
    try:
        return _FORMATS[name]
    except KeyError:
        near = get_close_matches(name, _FORMATS, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"choose one of {', '.join(names())}"
        raise UsageError(f"format {name!r} is unknown; {hint}") from None

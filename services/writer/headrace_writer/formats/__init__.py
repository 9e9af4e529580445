"""The dataset formats by name; `headrace.formats` has the same names, and what each is made from."""

from __future__ import annotations

from headrace.errors import UsageError
from headrace.hints import did_you_mean
from headrace_writer.formats.base import Format
from headrace_writer.formats.headrace import HeadraceFormat
from headrace_writer.formats.specforge import SpecforgeFormat

_FORMATS: dict[str, Format] = {form.name: form for form in (HeadraceFormat(), SpecforgeFormat())}


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
        hint = did_you_mean(name, _FORMATS) or f"; choose one of {', '.join(names())}"
        raise UsageError(f"format {name!r} is unknown{hint}") from None

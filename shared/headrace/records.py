"""Frozen values from JSON objects, names and types checked by hand: the capture core carries no pydantic."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any, TypeVar

from headrace.errors import Unreadable

_T = TypeVar("_T")
_KINDS = {"str": str, "int": int}
_WHOLE_NUMBERS = "tuple[int, ...]"


def check_schema(found: int, known: int, what: str = "") -> None:
    """Raise Unreadable for a schema that is newer than the known one, or below the first; `what` names the thing."""
    if found < 1:
        raise Unreadable(f"{what} schema {found} was never written; restore the file".lstrip())
    if found > known:
        raise Unreadable(f"{what} schema {found} is newer than {known}; upgrade headrace".lstrip())


def build(kind: type[_T], table: Mapping[str, Any]) -> _T:
    """Make a dataclass of `str`, `int` and `tuple[int, ...]` fields from a JSON object that has exactly these names.

    Raises:
        Unreadable: a name is missing or unknown, or a value is of another type.
    """
    types = {field.name: str(field.type) for field in fields(kind)}  # type: ignore[arg-type]
    if set(table) != set(types):
        raise Unreadable(f"{str(sorted(set(table) ^ set(types)))[:200]} missing or unknown")
    return kind(**{name: _checked(name, types[name], value) for name, value in table.items()})


def _checked(name: str, annotation: str, value: Any) -> Any:
    if annotation == _WHOLE_NUMBERS and isinstance(value, list) and all(type(entry) is int for entry in value):
        return tuple(value)
    if type(value) is not _KINDS.get(annotation):
        raise Unreadable(f"{name} is {str(value)[:40]!r}, not a {annotation}")
    if isinstance(value, str):
        try:
            value.encode()  # JSON can spell half a surrogate pair, which no store takes
        except UnicodeEncodeError as error:
            raise Unreadable(f"{name} is {value[:40]!a}, which is no text") from error
    return value

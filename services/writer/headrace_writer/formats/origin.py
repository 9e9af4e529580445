"""Where a row comes from, as strings that lie beside its tensors."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping

from headrace.errors import Unreadable
from headrace_writer.formats.base import Origin, RowSource

SCHEMA = 1
_WHOLE = re.compile("0|[1-9][0-9]{0,17}")


def encode_origin(source: RowSource, final_state: str) -> dict[str, str]:
    """Say where a row with this final state comes from."""
    return {
        "schema": str(SCHEMA),
        "run": source.request.run,
        "ordinal": str(source.request.ordinal),
        "sample": source.sample,
        "request": str(source.request),
        "boundaries": json.dumps(source.header.boundaries),
        "final_state": final_state,
        "model": source.header.model,
        "engine": source.header.engine,
        "weight_version": source.header.weight_version,
    }


def decode_origin(metadata: Mapping[str, str]) -> Origin:
    """Read what `encode_origin` said; raises Unreadable for another form or a newer schema."""
    try:
        schema = whole(metadata["schema"])
        if schema > SCHEMA:
            raise Unreadable(f"row of schema {schema} is newer than this headrace knows ({SCHEMA}); upgrade it")
        return Origin(
            run=metadata["run"],
            ordinal=whole(metadata["ordinal"]),
            sample=metadata["sample"],
            request=metadata["request"],
            boundaries=_boundaries(metadata["boundaries"]),
            final_state=metadata["final_state"],
            model=metadata["model"],
            engine=metadata["engine"],
            weight_version=metadata["weight_version"],
        )
    except (KeyError, ValueError, RecursionError) as error:
        raise Unreadable(f"the row's metadata: {type(error).__name__}: {str(error)[:200]}") from error


def whole(text: str) -> int:
    """Read a whole number as `str` spells it; raises ValueError for any other spelling, as of more than 18 digits."""
    if not _WHOLE.fullmatch(text):
        raise ValueError(f"{text[:40]!r} is not a whole number")
    return int(text)


def _boundaries(text: str) -> tuple[int, ...]:
    found = json.loads(text)
    if not isinstance(found, list) or not all(type(entry) is int for entry in found):
        raise ValueError(f"boundaries {text[:40]!r} are not a list of whole numbers")
    return tuple(found)

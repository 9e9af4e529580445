"""Where a row comes from, as strings that lie beside its tensors."""

from __future__ import annotations

import json
from collections.abc import Mapping

from headrace.errors import Unreadable
from headrace_writer.formats.base import Origin, RowSource

SCHEMA = 1


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
        schema = int(metadata["schema"])
        if schema > SCHEMA:
            raise Unreadable(f"row of schema {schema} is newer than this headrace knows ({SCHEMA}); upgrade it")
        return Origin(
            run=metadata["run"],
            ordinal=int(metadata["ordinal"]),
            sample=metadata["sample"],
            request=metadata["request"],
            boundaries=tuple(int(b) for b in json.loads(metadata["boundaries"])),
            final_state=metadata["final_state"],
            model=metadata["model"],
            engine=metadata["engine"],
            weight_version=metadata["weight_version"],
        )
    except (KeyError, ValueError, TypeError, RecursionError) as error:
        raise Unreadable(f"the row's metadata: {type(error).__name__}: {error}") from error

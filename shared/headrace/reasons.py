"""Why a dump is refused or a request lost; apart from the verdicts, so that the capture core stays light."""

from __future__ import annotations

from enum import StrEnum


class Reason(StrEnum):
    """Why a dump was refused, a request lost, or a sample rejected; each is a metric's label."""

    TOKEN_CONTENT = "token_content"
    TOKEN_COUNT = "token_count"
    LAYERS = "layers"
    SHAPE = "shape"
    NOT_FINITE = "not_finite"
    DEGENERATE = "degenerate"
    WEIGHTS_CHANGED = "weights_changed"
    ENGINE_CHANGED = "engine_changed"
    PREFIX_CACHED = "prefix_cached"
    INCOMPLETE = "incomplete"
    UNREADABLE = "unreadable"
    CORRUPT = "corrupt"
    UNKNOWN_RUN = "unknown_run"
    NO_ROOM = "no_room"
    EVICTED = "evicted"
    ABORTED = "aborted"
    INTERNAL = "internal"
    DUPLICATE = "duplicate"


LOSSES = frozenset({Reason.NO_ROOM, Reason.EVICTED, Reason.ABORTED, Reason.INTERNAL})
MISMATCHES = frozenset(Reason) - LOSSES - {Reason.DUPLICATE}
LOST_REASONS = LOSSES | {Reason.PREFIX_CACHED, Reason.INCOMPLETE}

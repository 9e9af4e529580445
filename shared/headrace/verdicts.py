"""The verdict on a dump: a pure function of what it says, what was asked, and what the run requires."""

from __future__ import annotations

import math
from dataclasses import dataclass

from headrace.dumps import Dump, DumpHeader
from headrace.ids import RequestId
from headrace.reasons import LOSSES as LOSSES
from headrace.reasons import LOST_REASONS as LOST_REASONS
from headrace.reasons import MISMATCHES as MISMATCHES
from headrace.reasons import Reason as Reason
from headrace.runs import Identity, RunSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Match:
    """Every check passed: the dump holds the states of the tokens that were sent."""

    identity: Identity


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """A check failed: `detail` says what was found and what was expected."""

    reason: Reason
    detail: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Requirement:
    """What a dump must be: D, ascending boundaries, `pre_norm` or `post_norm`, and the first row's identity if any."""

    boundaries: tuple[int, ...]
    final_state: str
    hidden_size: int
    identity: Identity | None

    @classmethod
    def of(cls, spec: RunSpec, identity: Identity | None, *, stored: bool = False) -> Requirement:
        """The requirement of a run for its dumps, or for the rows that are `stored`."""
        return cls(
            boundaries=spec.boundaries,
            final_state=spec.stored_state if stored else spec.final_state,
            hidden_size=spec.hidden_size,
            identity=identity,
        )


def judge(dump: Dump, request: RequestId, requirement: Requirement) -> Match | Refusal:
    """Compare a dump with the request that its file name carries and with its run.

    The token ids are proven by the digest inside the id, so a verdict needs no other state.
    """
    header = dump.header
    identity = Identity(engine=header.engine, weight_version=header.weight_version)
    refusal = (
        _tokens(dump, request)
        or _layers(header, requirement)
        or _shape(header, requirement)
        or _values(header)
        or changed_identity(identity, requirement.identity)
    )
    return refusal or Match(identity=identity)


def _tokens(dump: Dump, request: RequestId) -> Refusal | None:
    header = dump.header
    if header.request != str(request):
        return Refusal(reason=Reason.TOKEN_CONTENT, detail=f"the dump says it is {header.request[:100]!r}")
    rows = header.tensors["token_ids"].shape
    if rows != (request.tokens,) or header.tokens != request.tokens:
        return Refusal(reason=Reason.TOKEN_COUNT, detail=f"token_ids {rows}, sent {request.tokens}")
    if not request.proves(dump.token_ids):
        return Refusal(reason=Reason.TOKEN_CONTENT, detail="the model computed other token ids than were sent")
    return None


def _layers(header: DumpHeader, requirement: Requirement) -> Refusal | None:
    if header.boundaries != requirement.boundaries:
        detail = f"boundaries {list(header.boundaries)}, the run requires {list(requirement.boundaries)}"
        return Refusal(reason=Reason.LAYERS, detail=detail)
    if header.final_state != requirement.final_state:
        detail = f"final state {header.final_state!r}, the run requires {requirement.final_state!r}"
        return Refusal(reason=Reason.LAYERS, detail=detail)
    return None


def _shape(header: DumpHeader, requirement: Requirement) -> Refusal | None:
    aux, final = header.tensors["aux"], header.tensors["final"]
    width = requirement.hidden_size
    expected = (header.tokens, len(requirement.boundaries) * width), (header.tokens, width)
    if (aux.shape, final.shape) != expected:
        return Refusal(reason=Reason.SHAPE, detail=f"aux {aux.shape}, final {final.shape}, expected {expected}")
    if aux.dtype != final.dtype or aux.dtype not in ("BF16", "F16", "F32"):
        return Refusal(reason=Reason.SHAPE, detail=f"aux is {aux.dtype}, final is {final.dtype}")
    return None


def _values(header: DumpHeader) -> Refusal | None:
    layers = [entry.layer for entry in header.stats]
    if layers != [*(str(b) for b in header.boundaries), "final"]:
        return Refusal(reason=Reason.UNREADABLE, detail=f"statistics of {layers}, not of each boundary and the final")
    for entry in header.stats:
        if entry.not_finite or not (math.isfinite(entry.norm_min) and math.isfinite(entry.norm_max)):
            detail = f"{entry.not_finite} values at {entry.layer} are NaN or infinite"
            return Refusal(reason=Reason.NOT_FINITE, detail=detail)
    for entry in header.stats:
        if entry.norm_min <= 0:
            return Refusal(reason=Reason.DEGENERATE, detail=f"a row at {entry.layer} is all zeros")
    return None


def changed_identity(found: Identity, first: Identity | None) -> Refusal | None:
    """Refuse an engine or weights other than those of the run's first row, if it has one."""
    if first is None:
        return None
    if found.engine != first.engine:
        detail = f"engine {found.engine!r}, the run's first row came from {first.engine!r}"
        return Refusal(reason=Reason.ENGINE_CHANGED, detail=detail)
    if found.weight_version != first.weight_version:
        detail = f"weights {found.weight_version!r}, the run's first row had {first.weight_version!r}"
        return Refusal(reason=Reason.WEIGHTS_CHANGED, detail=detail)
    return None

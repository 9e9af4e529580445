"""Decides what becomes of each piece of a forward: placed, lost with a reason, or ignored."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from headrace.errors import InvalidId
from headrace.ids import RequestId, is_ours
from headrace.reasons import Reason
from headrace_capture.forward import Piece
from headrace_capture.intervals import Coverage


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Write forward rows from `source` on as rows [begin, end) of the request's `tokens` rows.

    `first` opens the request; `complete` says that all its rows are covered now. `parts` and `retractions` are so
    far, this place included.
    """

    request: str
    tokens: int
    source: int
    begin: int
    end: int
    first: bool
    complete: bool
    parts: int
    retractions: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Loss:
    """The request's states cannot be published."""

    request: str
    reason: Reason
    detail: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What one forward brings, in row order; `ignored` counts the pieces that nobody captures."""

    places: tuple[Place, ...]
    losses: tuple[Loss, ...]
    ignored: int


@dataclass(slots=True, kw_only=True)
class _Entry:
    tokens: int
    weight_version: str
    first_begin: int
    previous_end: int
    touched: float
    coverage: Coverage = field(default_factory=Coverage)
    parts: int = 0
    retractions: int = 0


class Assembly:
    """The half-assembled requests, and the concluded ones that are still remembered.

    Pure: time is an argument, in seconds of any monotonic clock.
    """

    def __init__(self, *, deadline: float, remember: int) -> None:
        self._deadline = deadline
        self._remember = remember
        self._open: dict[str, _Entry] = {}
        self._concluded: dict[str, None] = {}

    @property
    def half_assembled(self) -> int:
        """How many requests have some of their rows."""
        return len(self._open)

    def plan(self, pieces: Sequence[Piece], weight_version: str, now: float) -> Plan:
        """Decide about a forward's pieces, whose rows follow each other from row 0 on.

        A scheduler has at most one half-prefilled request, so when the forward leaves one behind, every other one
        is evicted: it was aborted or retracted, and must not hold its room for ever.
        """
        losses = self.expire(now)
        places: list[Place] = []
        ignored = 0
        source = 0
        for piece in pieces:
            decision = self._decide(piece, source, weight_version, now)
            source += piece.rows
            if isinstance(decision, Place):
                places.append(decision)
            elif isinstance(decision, Loss):
                losses.append(decision)
            else:
                ignored += 1
        losses += self._evict(places)
        gone = {loss.request for loss in losses}
        return Plan(
            places=tuple(place for place in places if place.request not in gone),
            losses=tuple(losses),
            ignored=ignored,
        )

    def expire(self, now: float) -> list[Loss]:
        """Conclude the requests that waited longer than the deadline for another part."""
        detail = f"no other part came within {self._deadline:g} s"
        return [
            self._lose(request, Reason.EVICTED, detail)
            for request, entry in list(self._open.items())
            if now - entry.touched > self._deadline
        ]

    def refuse(self, pieces: Sequence[Piece], detail: str) -> list[Loss]:
        """Conclude the requests of a forward that cannot be used."""
        wanted = (piece for piece in pieces if piece.prefix < piece.prompt_tokens or piece.rid in self._open)
        requests = dict.fromkeys(piece.rid for piece in wanted)
        return [
            self._lose(request, Reason.INTERNAL, detail)
            for request in requests
            if is_ours(request) and request not in self._concluded
        ]

    def abort(self, request: str, detail: str) -> Loss | None:
        """Conclude a half-assembled request as aborted; None when it is not half assembled."""
        if request not in self._open:
            return None
        return self._lose(request, Reason.ABORTED, detail)

    def abort_all(self, detail: str) -> list[Loss]:
        """Conclude every half-assembled request as aborted."""
        return [self._lose(request, Reason.ABORTED, detail) for request in list(self._open)]

    def conclude(self, request: str) -> None:
        """Forget what is open and remember the id, so that a late part is ignored."""
        self._open.pop(request, None)
        self._concluded[request] = None
        while len(self._concluded) > self._remember:
            del self._concluded[next(iter(self._concluded))]

    def _decide(self, piece: Piece, source: int, weight_version: str, now: float) -> Place | Loss | None:
        request = piece.rid
        try:
            tokens = RequestId.parse(request).tokens
        except InvalidId:
            return None
        if request in self._concluded or piece.rows == 0:
            return None
        if tokens != piece.prompt_tokens:
            # This is how the one stub row of a prompt that the engine refused as too long looks.
            detail = f"the id says {tokens} tokens, the engine's prompt has {piece.prompt_tokens}"
            return self._lose(request, Reason.INCOMPLETE, detail)
        entry = self._open.get(request)
        if piece.prefix >= tokens:  # a decode row: every row of the prompt is past
            return None if entry is None else self._missing(request, entry)
        return self._place(piece, tokens, entry, source, weight_version, now)

    def _place(
        self, piece: Piece, tokens: int, entry: _Entry | None, source: int, weight_version: str, now: float
    ) -> Place | Loss:
        request, begin = piece.rid, piece.prefix
        # A request retracted while it decoded is prefilled again with its generated tokens, which are not ours.
        end = min(begin + piece.rows, tokens)
        first = entry is None
        if entry is None:
            entry = _Entry(
                tokens=tokens, weight_version=weight_version, first_begin=begin, previous_end=begin, touched=now
            )
            self._open[request] = entry
        if entry.weight_version != weight_version:
            detail = f"weights changed from {entry.weight_version!r} to {weight_version!r} in the middle of the prompt"
            return self._lose(request, Reason.INCOMPLETE, detail)
        repeated = entry.coverage.add(begin, end)
        entry.parts += 1
        entry.retractions += repeated > 0 and begin < entry.previous_end
        entry.previous_end = end
        entry.touched = now
        complete = entry.coverage.covers(tokens)
        if end == tokens and not complete:
            return self._missing(request, entry)
        if complete:
            self.conclude(request)
        return Place(
            request=request,
            tokens=tokens,
            source=source,
            begin=begin,
            end=end,
            first=first,
            complete=complete,
            parts=entry.parts,
            retractions=entry.retractions,
        )

    def _missing(self, request: str, entry: _Entry) -> Loss:
        missing = entry.coverage.missing(entry.tokens)
        detail = f"the last row was computed, but {missing} of {entry.tokens} rows were not"
        if entry.first_begin > 0:
            detail += f": the first part began at row {entry.first_begin}, so the rest came from the prefix cache"
            return self._lose(request, Reason.PREFIX_CACHED, detail)
        return self._lose(request, Reason.INCOMPLETE, detail)

    def _evict(self, places: Sequence[Place]) -> list[Loss]:
        partial = [place.request for place in places if place.request in self._open]
        if not partial:
            return []
        detail = f"another request, {partial[-1]}, was half prefilled after it"
        return [self._lose(request, Reason.EVICTED, detail) for request in list(self._open) if request != partial[-1]]

    def _lose(self, request: str, reason: Reason, detail: str) -> Loss:
        self.conclude(request)
        return Loss(request=request, reason=reason, detail=detail)

"""Turns the forward of a step into the forwards that the capture gets, some of whose requests go wrong."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterable, Iterator
from threading import Event

from headrace.ids import is_ours
from headrace_capture.forward import Forward, Piece
from headrace_engine.faults.log import Hits
from headrace_engine.faults.parts import CHANGES, clip, ends_at, rows_of, with_states_of
from headrace_engine.faults.plan import Fault, Kind

_STATEFUL = frozenset({Kind.DISORDERED_PARTS, Kind.OTHER_STATES, Kind.EVICTED, Kind.ABORT, Kind.HANG, Kind.CRASH})
_REMEMBERED = 64  # rows of an untouched prompt, for a request that gets another one's states


class Forwards:
    """The faults of a plan that act between the model and the capture; used by the scheduler's thread alone."""

    def __init__(self, hits: Hits, stopping: Event) -> None:
        """`stopping` ends a hang."""
        self._hits = hits
        self._stopping = stopping
        self._remember = any(fault.kind is Kind.OTHER_STATES for fault in hits.plan.faults)
        self._seen: Forward | None = None
        self._early: list[Forward] = []  # parts that wait for a later one; at most one request is half prefilled
        self._late: list[Forward] = []  # parts of a request that the next half-prefilled one evicts

    def of(self, forward: Forward, withdraw: Callable[[str], None]) -> Iterator[Forward]:
        """Yield what the capture gets instead of the step's forward, each to be captured before the next is asked for.

        The rows of requests that go well stay together and in order. A request that goes wrong gets forwards of its
        own, in its place: so none is evicted that the order of the step had closed, or not opened yet. `withdraw`
        aborts a request.
        """
        well: list[Piece] = []
        begin = source = 0
        for piece in forward.pieces:
            end = source + piece.rows
            fault = self._hits.of(piece.rid)
            if fault is not None and (fault.kind in CHANGES or fault.kind in _STATEFUL):
                parts = self._wrong(fault, rows_of(forward, source, piece), withdraw)
            elif self._late and _may_evict(piece):
                parts = self._evict(rows_of(forward, source, piece))
            else:
                self._see(forward, source, piece)
                well.append(piece)
                source = end
                continue
            if well:
                yield rows_of(forward, begin, *well)
                well = []
            yield from parts
            begin = source = end
        if well:
            yield rows_of(forward, begin, *well)

    def _wrong(self, fault: Fault, part: Forward, withdraw: Callable[[str], None]) -> Iterable[Forward]:
        if _decodes(part.pieces[0]):  # of no interest to the capture once the prompt is past
            return ()
        if fault.kind in CHANGES:
            return CHANGES[fault.kind](part)
        if fault.kind is Kind.DISORDERED_PARTS:
            return self._disordered(part)
        if fault.kind is Kind.OTHER_STATES:
            return (part if self._seen is None else with_states_of(part, self._seen),)
        if fault.kind is Kind.EVICTED:
            return self._evicted(part)
        if fault.kind is Kind.ABORT:
            return _aborted(part, withdraw)
        return self._hang(part, fault.seconds) if fault.kind is Kind.HANG else _crash(part)

    def _disordered(self, part: Forward) -> Iterator[Forward]:
        """The second third before the first, and the last one last."""
        tokens = part.pieces[0].prompt_tokens
        same = [early for early in self._early if early.pieces[0].rid == part.pieces[0].rid]  # others were aborted
        self._early = [*same, *clip(part, 0, tokens // 3)]
        yield from clip(part, tokens // 3, 2 * tokens // 3)
        for rest in clip(part, 2 * tokens // 3, tokens):
            yield from self._early
            self._early = []
            yield rest

    def _evicted(self, part: Forward) -> Iterator[Forward]:
        """The first half; the rest is late. Another one that waits to be evicted is so by this one."""
        tokens = part.pieces[0].prompt_tokens
        for first in clip(part, 0, tokens // 2):
            yield first
            yield from self._take_late(other_than=first.pieces[0].rid)
        self._late += clip(part, tokens // 2, tokens)

    def _evict(self, part: Forward) -> Iterator[Forward]:
        """A request that goes well, half prefilled for a moment."""
        piece = part.pieces[0]
        middle = piece.prefix + piece.rows // 2
        yield from clip(part, piece.prefix, middle)
        yield from self._take_late()
        yield from clip(part, middle, piece.prefix + piece.rows)

    def _take_late(self, other_than: str = "") -> list[Forward]:
        taken = [part for part in self._late if part.pieces[0].rid != other_than]
        self._late = [part for part in self._late if part.pieces[0].rid == other_than]
        return taken

    def _hang(self, part: Forward, seconds: float) -> Iterator[Forward]:
        if ends_at(part, part.pieces[0].prompt_tokens):
            self._stopping.wait(seconds)
        yield part

    def _see(self, forward: Forward, source: int, piece: Piece) -> None:
        if self._remember and piece.rows > 1 and not _decodes(piece):
            rows = rows_of(forward, source, piece)
            for first in clip(rows, piece.prefix, piece.prefix + _REMEMBERED):
                self._seen = first


def _aborted(part: Forward, withdraw: Callable[[str], None]) -> Iterator[Forward]:
    """The first part of several; where the last one is the first, since the others were cached, none."""
    if not ends_at(part, part.pieces[0].prompt_tokens):
        yield part
    withdraw(part.pieces[0].rid)


def _crash(part: Forward) -> Iterator[Forward]:
    """The first half, and the end of the process."""
    tokens = part.pieces[0].prompt_tokens
    yield from clip(part, 0, tokens // 2)
    if clip(part, tokens // 2, tokens):
        os.kill(os.getpid(), signal.SIGKILL)


def _may_evict(piece: Piece) -> bool:
    return is_ours(piece.rid) and piece.rows > 1 and not _decodes(piece)


def _decodes(piece: Piece) -> bool:
    return piece.prefix >= piece.prompt_tokens

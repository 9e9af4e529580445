"""Runs requests through the model in steps with a token budget, as SGLang does, and hands each step to the capture."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from threading import Condition, Thread
from typing import TYPE_CHECKING, Any

import torch

from headrace import logs
from headrace.errors import HeadraceError, Unavailable, UsageError
from headrace_capture.forward import Forward, Piece
from headrace_engine.faults.forwards import Forwards
from headrace_engine.model import Captured, TargetModel
from headrace_engine.prefixes import PrefixCache
from headrace_engine.steps import Answer, Chunk, Request, plan

if TYPE_CHECKING:
    from headrace_engine.capturing import Capturing

_log = logs.get(__name__)
_ABORTED = {"type": "abort", "message": "aborted"}


class DuplicateRequest(UsageError):
    """A request of that id is in flight; use a new id for each attempt."""


class Scheduler:
    """One thread that owns the model, its requests' caches and the calls of the capture core.

    Args:
        capture: takes each step's Forward, or None to serve without capture.
        chunk_tokens: prompt tokens a step computes at most.
        max_running: requests in a step at most.
        max_queued: requests in flight at most.
        prefix_cache: tokens of finished and running prompts that are kept for those that begin alike; 0 keeps none.
        faults: what the capture gets instead of a step's forward, or None.
        on_failure: called from the thread when a step failed; every request is answered with the error first.
    """

    def __init__(
        self,
        model: TargetModel,
        capture: Capturing | None,
        *,
        chunk_tokens: int,
        max_running: int,
        max_queued: int,
        weight_version: str,
        on_failure: Callable[[Exception], None],
        prefix_cache: int = 0,
        faults: Forwards | None = None,
    ) -> None:
        self._model = model
        self._capture = capture
        self._chunk_tokens = chunk_tokens
        self._max_running = max_running
        self._max_queued = max_queued
        self._weight_version = weight_version
        self._on_failure = on_failure
        self._faults = faults
        self._prefixes = PrefixCache(prefix_cache, like=model.new_cache()) if prefix_cache else None
        self._changed = Condition()  # guards all below
        self._in_flight: dict[str, Request] = {}
        self._waiting: deque[Request] = deque()
        self._decoding: list[Request] = []
        self._abort_at: float | None = None  # set once draining: no request is taken any more
        self._thread = Thread(target=self._run, name="scheduler", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def submit(
        self,
        rid: str,
        prompt: Sequence[int],
        max_new_tokens: int,
        *,
        ignore_eos: bool = False,
        extra_key: str = "",
        aborted: bool = False,
    ) -> Future[Answer]:
        """Queue a request; its future resolves when it is over, aborted or not. With `aborted` it never runs.

        Raises:
            DuplicateRequest: the id is in flight; that request is unharmed.
            Unavailable: the queue is full, or the engine stops.
        """
        answer: Future[Answer] = Future()
        answer.set_running_or_notify_cancel()  # nobody but the thread ends it
        request = Request(
            rid=rid,
            prompt=tuple(prompt),
            max_new_tokens=max_new_tokens,
            stop_tokens=frozenset() if ignore_eos else self._model.stop_tokens,
            cache=self._model.new_cache(),
            answer=answer,
            extra_key=extra_key,
            aborted=aborted,
        )
        with self._changed:
            self.check(rid)
            self._in_flight[rid] = request
            self._waiting.append(request)
            self._changed.notify()
        return answer

    def check(self, rid: str) -> None:
        """Raise what `submit` would if a request came now."""
        with self._changed:
            if rid in self._in_flight:
                raise DuplicateRequest(f"Duplicate request ID detected: {rid} is in flight; use a new one")
            if self._abort_at is not None:
                raise Unavailable("the engine stops; try another")
            if len(self._in_flight) >= self._max_queued:
                raise Unavailable(f"the queue is full with {self._max_queued} requests; try again later")

    def abort(self, prefix: str) -> None:
        """Abort each request whose id starts with `prefix`, as SGLang does; the step that runs ends first."""
        self._abort(lambda rid: rid.startswith(prefix))

    def withdraw(self, rid: str) -> None:
        """Abort the one request whose client went away."""
        self._abort(lambda other: other == rid)

    def drain(self, seconds: float) -> None:
        """Take no more requests, give those in flight `seconds`, then abort them; the thread ends when all are over."""
        with self._changed:
            self._abort_at = time.monotonic() + seconds
            self._changed.notify()

    def join(self, timeout: float) -> bool:
        """Wait for the thread to end; returns whether it did."""
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def counts(self) -> dict[str, int]:
        """How many requests are in flight, how many of those decode, and how many tokens the prefix cache holds."""
        cached = self._prefixes.held if self._prefixes else 0
        with self._changed:
            return {"in_flight": len(self._in_flight), "decoding": len(self._decoding), "cached_tokens": cached}

    def run_step(self, step: Sequence[Chunk]) -> Forward:
        """Compute a step's chunks, each with its request's own cache, and return all their rows in that order."""
        pieces: list[Piece] = []
        token_ids: list[int] = []
        parts: list[Captured] = []
        for chunk in step:
            request, rows = chunk.request, chunk.rows
            tokens = request.next_tokens(rows)
            captured = self._model.forward(tokens, request.cache, want_token=request.wants_token(rows))
            pieces.append(Piece(rid=request.rid, prompt_tokens=len(request.prompt), prefix=request.computed, rows=rows))
            token_ids.extend(tokens)
            parts.append(captured)
            request.advance(rows, captured.next_token)
            if self._prefixes and pieces[-1].prefix < len(request.prompt):
                self._prefixes.keep(request.extra_key, request.prompt[: request.computed], request.cache)
        return Forward(
            pieces=tuple(pieces),
            token_ids=torch.tensor(token_ids, dtype=torch.int64),
            boundaries=tuple(torch.cat(states) for states in zip(*(part.boundaries for part in parts), strict=True)),
            final=torch.cat([part.final for part in parts]),
            weight_version=self._weight_version,
        )

    def _run(self) -> None:
        error: Exception = Unavailable("the engine has stopped")
        try:
            while step := self._next_step():
                forward = self.run_step(step)
                self._settle(step, self._hand_over(forward))
        except Exception as failure:  # noqa: BLE001 - whatever fails, no client may wait for ever
            _log.exception("a step failed")
            error = failure if isinstance(failure, HeadraceError) else Unavailable(f"a step failed: {failure}")
            self._on_failure(error)
        finally:
            self._refuse_all(error)

    def _hand_over(self, forward: Forward) -> dict[str, str]:
        """Let the capture have a step's forward; returns what it dropped."""
        dropped: dict[str, str] = {}
        for part in self._faults.of(forward, self.withdraw) if self._faults else (forward,):
            if self._capture:
                dropped |= self._capture.forward(part)
        return dropped

    def _next_step(self) -> list[Chunk]:
        """Wait for work and choose a step; an empty one means that the engine drained."""
        with self._changed:
            while True:
                if self._abort_at is not None and time.monotonic() >= self._abort_at:
                    for request in self._in_flight.values():
                        request.aborted = True
                self._end_aborted()
                step = plan(self._startable(), self._decoding, budget=self._chunk_tokens, max_running=self._max_running)
                if step or self._abort_at is not None:
                    return step
                self._changed.wait()

    def _startable(self) -> Iterator[Request]:
        """The waiting requests, each with what is cached of its prompt by the time that it is begun."""
        for request in self._waiting:
            if self._prefixes and not request.computed:
                request.cached = self._prefixes.fill(request.extra_key, request.prompt, request.cache)
                request.computed = request.cached
            yield request

    def _settle(self, step: Sequence[Chunk], dropped: dict[str, str]) -> None:
        """Move the step's requests on, and answer those that are over."""
        with self._changed:
            for chunk in step:
                request = chunk.request
                request.dropped = dropped.get(request.rid, request.dropped)
                if request.prompt_left:
                    continue
                if self._waiting and self._waiting[0] is request:
                    self._waiting.popleft()
                    self._decoding.append(request)
                reason = request.finish_reason()
                if reason is not None and not request.aborted:  # an abort wins, as in SGLang
                    self._decoding.remove(request)
                    self._end(request, reason)

    def _abort(self, wanted: Callable[[str], bool]) -> None:
        with self._changed:
            for rid, request in self._in_flight.items():
                request.aborted = request.aborted or wanted(rid)
            self._changed.notify()

    def _end_aborted(self) -> None:
        aborted = [request for request in self._in_flight.values() if request.aborted]
        for request in aborted:
            if self._capture:
                self._capture.abort(request.rid)
            (self._decoding if request in self._decoding else self._waiting).remove(request)
            self._end(request, _ABORTED)

    def _end(self, request: Request, reason: dict[str, Any]) -> None:
        del self._in_flight[request.rid]
        request.answer.set_result(
            Answer(
                output_ids=tuple(request.output),
                finish_reason=reason,
                dropped=request.dropped,
                cached=request.cached,
            )
        )

    def _refuse_all(self, error: Exception) -> None:
        with self._changed:
            self._abort_at = 0.0
            for request in self._in_flight.values():
                request.answer.set_exception(error)
            self._in_flight.clear()

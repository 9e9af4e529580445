"""Requests in flight from this process: posted in threads, their leases renewed until the engine answers."""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from headrace import logs, metrics
from headrace.bus import Bus
from headrace.bus.values import AttemptKind
from headrace.errors import Unavailable
from headrace.ids import RequestId
from headrace.verdicts import LOSSES, LOST_REASONS
from headrace_dispatcher.engines import Answer, EngineClient

log = logs.get(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Flight:
    """One claimed request: where it goes and the token ids that it sends."""

    request: RequestId
    site: str
    url: str
    token_ids: Sequence[int]


class Flights:
    """Posts claimed requests. Thread-safe; the threads of a site are as many as its requests in flight."""

    def __init__(self, bus: Bus, client: EngineClient, on_end: Callable[[Flight, Answer], None]) -> None:
        """`on_end` is told of each answer, after it was reported to the bus."""
        self._bus = bus
        self._client = client
        self._on_end = on_end
        self._lock = threading.Lock()
        self._live: dict[str, Flight] = {}
        self._unreported: dict[str, tuple[Flight, Answer]] = {}
        self._pools: dict[str, ThreadPoolExecutor] = {}

    def start(self, flight: Flight, width: int) -> None:
        """Post in a thread; `width` is the site's limit of requests in flight."""
        with self._lock:
            self._live[str(flight.request)] = flight
            pool = self._pools.get(flight.site)
            if pool is None:
                pool = ThreadPoolExecutor(max_workers=width, thread_name_prefix=f"post-{flight.site}")
                self._pools[flight.site] = pool
        pool.submit(self._fly, flight)

    def renew(self) -> None:
        """Renew the leases of what is in flight, and report answers that Redis did not take yet."""
        with self._lock:
            live, waiting = list(self._live.values()), list(self._unreported.values())
        for flight, answer in waiting:
            self._report(flight, answer)
        by_run: dict[str, list[str]] = defaultdict(list)
        for flight in live:
            by_run[flight.request.run].append(str(flight.request))
        for run, names in by_run.items():
            for lost in self._bus.requests.renew(run, names):
                log.info("lease of a request in flight is gone", request=lost)

    def count(self) -> int:
        """Requests in flight."""
        with self._lock:
            return len(self._live)

    def close(self) -> None:
        """Give up what is still in flight: its samples become pending without a burnt attempt."""
        with self._lock:
            left = list(self._live.values())
            pools = list(self._pools.values())
        for pool in pools:
            pool.shutdown(wait=False, cancel_futures=True)
        for flight in left:
            self._report(flight, Answer(outcome="unavailable", reason="dispatcher_stopped"))
            self._client.abort(flight.url, str(flight.request))

    def _fly(self, flight: Flight) -> None:
        began = time.monotonic()
        answer = Answer(outcome="unavailable", reason="internal")
        try:
            answer = self._client.generate(flight.url, str(flight.request), flight.token_ids)
            metrics.STAGE_SECONDS.labels("request").observe(time.monotonic() - began)
            metrics.REQUESTS.labels(flight.request.run, answer.outcome).inc()
            self._report(flight, answer)
        finally:  # whatever happened, the lease is renewed no more
            with self._lock:
                self._live.pop(str(flight.request), None)
            self._on_end(flight, answer)

    def _report(self, flight: Flight, answer: Answer) -> None:
        name = str(flight.request)
        try:
            if answer.outcome == "answered":
                self._bus.requests.answered(flight.request.run, name)
            else:
                outcome = self._bus.requests.end(
                    flight.request, burn=answer.burns, kind=_kind(answer), reason=answer.reason
                )
                log.warning("attempt ended", request=name, reason=answer.reason, detail=answer.detail, outcome=outcome)
        except Unavailable as error:
            # The lease lapses by itself if this process dies before Redis is back.
            log.warning("answer not reported yet", request=name, error=str(error))
            with self._lock:
                self._unreported[name] = (flight, answer)
        else:
            with self._lock:
                self._unreported.pop(name, None)


def _kind(answer: Answer) -> AttemptKind:
    if answer.outcome != "dropped" or answer.reason not in LOST_REASONS:
        return "error"
    return "loss" if answer.reason in LOSSES else "mismatch"

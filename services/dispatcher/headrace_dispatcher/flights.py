"""Requests in flight from this process: posted in threads, their leases renewed until the engine answers."""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from headrace import logs, metrics
from headrace.bus import Bus
from headrace.bus.values import AttemptKind, Burn
from headrace.errors import RedisAway
from headrace.generate import Answer
from headrace.ids import RequestId
from headrace.verdicts import LOSSES
from headrace_dispatcher.engines import EngineClient

log = logs.get(__name__)

_ABORT_SECONDS = 3.0  # for all engines together, at the end


@dataclass(frozen=True, slots=True, kw_only=True)
class Flight:
    """One claimed request: where it goes and the token ids that it sends."""

    request: RequestId
    site: str
    boot: str
    url: str
    token_ids: Sequence[int]


class Flights:
    """Posts claimed requests, each in a thread: the sites' limits of requests in flight bound them. Thread-safe."""

    def __init__(
        self,
        bus: Bus,
        client: EngineClient,
        on_answer: Callable[[Flight, Answer], bool],
        on_end: Callable[[], None],
        on_crash: Callable[[BaseException], None],
    ) -> None:
        """`on_answer` is told of each answer before the bus is; True if a failure may be the request's own.

        `on_end` is called after that, when the sample may be claimed again; `on_crash` is told of what must not happen.
        """
        self._bus = bus
        self._client = client
        self._on_answer = on_answer
        self._on_end = on_end
        self._on_crash = on_crash
        self._lock = threading.Lock()
        self._live: dict[str, Flight] = {}
        self._unreported: dict[str, tuple[Flight, Answer, bool]] = {}

    def start(self, flight: Flight) -> None:
        """Post in a thread, which does not hold the process when it ends: an engine may never answer."""
        with self._lock:
            self._live[str(flight.request)] = flight
        threading.Thread(target=self._fly, args=(flight,), name=f"post-{flight.site}", daemon=True).start()

    def renew(self) -> None:
        """Renew the leases of what is in flight, and report answers that Redis did not take yet."""
        with self._lock:
            live, waiting = list(self._live.values()), list(self._unreported.values())
        for flight, answer, suspect in waiting:
            self._report(flight, answer, suspect)
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
        # Reported before it is aborted, or the abort's answer would burn the attempt.
        stopped = Answer(outcome="unavailable", reason="dispatcher_stopped")
        for flight in left:
            if not self._report(flight, stopped, suspect=False):
                break  # Redis is away: the leases lapse
        aborts = [
            threading.Thread(target=self._client.abort, args=(flight.url, str(flight.request)), daemon=True)
            for flight in left
        ]
        until = time.monotonic() + _ABORT_SECONDS
        for abort in aborts:
            abort.start()
        for abort in aborts:
            abort.join(max(0.0, until - time.monotonic()))

    def _fly(self, flight: Flight) -> None:
        began = time.monotonic()
        try:
            answer = self._client.generate(flight.url, str(flight.request), flight.token_ids)
            metrics.STAGE_SECONDS.labels("request").observe(time.monotonic() - began)
            metrics.REQUESTS.labels(flight.request.run, answer.outcome).inc()
            self._report(flight, answer, self._on_answer(flight, answer))
        except BaseException as error:  # noqa: BLE001 - the main thread raises it: half a process must not live on
            self._on_crash(error)
        finally:  # whatever happened, the lease is renewed no more
            with self._lock:
                self._live.pop(str(flight.request), None)
            self._on_end()

    def _report(self, flight: Flight, answer: Answer, suspect: bool) -> bool:
        name = str(flight.request)
        burn: Burn = answer.burns or ("if_alone" if suspect else False)
        try:
            if answer.outcome == "answered":
                self._bus.requests.answered(flight.request.run, name)
            else:
                outcome = self._bus.requests.end(
                    flight.request,
                    burn=burn,
                    kind=_kind(answer),
                    reason=answer.reason,
                    counted=answer.counted,
                    unless_captured=True,  # the dump may be there although its answer was lost on the way
                )
                log.warning("attempt ended", request=name, reason=answer.reason, detail=answer.detail, outcome=outcome)
        except RedisAway as error:
            # The lease lapses by itself if this process dies before Redis is back.
            log.warning("answer not reported yet", request=name, error=str(error))
            with self._lock:
                self._unreported[name] = (flight, answer, suspect)
            return False
        with self._lock:
            self._unreported.pop(name, None)
        return True


def _kind(answer: Answer) -> AttemptKind:
    if answer.outcome != "dropped":
        return "error"
    return "loss" if answer.reason in LOSSES else "mismatch"

"""What each engine may be sent now: its breaker, the threads that probe it, and a rest when it is out of room."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from headrace import logs, metrics
from headrace.bus.values import Site
from headrace.generate import Answer
from headrace.reasons import Reason
from headrace_dispatcher.breaker import Breaker, State
from headrace_dispatcher.flights import Flight

log = logs.get(__name__)

_NO_ROOM_SECONDS = 1.0  # for writers to empty the folder of an engine that had no room

_MOST_REMEMBERED = 1000  # sites that failed and are not registered

_Life = tuple[str, str]  # site and boot


@dataclass(slots=True)
class _Circuit:
    url: str
    breaker: Breaker = field(default_factory=Breaker)
    epochs: dict[str, int] = field(default_factory=dict)  # of the requests that are in flight
    full_until: float = 0.0

    @property
    def failing(self) -> bool:
        """Whether the engine failed last, or has requests whose failures may not be heard of any more."""
        return bool(self.epochs or self.breaker.failures or self.breaker.state is not State.CLOSED)


class Circuits:
    """The breakers of all registered engines. Thread-safe: answers and probes come from threads of their own."""

    def __init__(
        self,
        probe: Callable[[str], str],
        wake: Callable[[], None],
        on_crash: Callable[[BaseException], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`probe` asks the engine at a URL and returns what is wrong, `wake` is called when one may be sent more."""
        self._probe = probe
        self._wake = wake
        self._on_crash = on_crash
        self._clock = clock
        self._lock = threading.Lock()
        self._circuits: dict[_Life, _Circuit] = {}
        self._failed: dict[str, None] = {}  # sites whose engine was failing when it was last seen, oldest first

    def look(self, sites: Sequence[Site]) -> None:
        """Take in the sites that are registered now, and begin the probes that are due."""
        registered = {(site.site, site.boot): site.url for site in sites}
        with self._lock:
            for gone in self._circuits.keys() - registered.keys():
                if self._circuits.pop(gone).failing:
                    self._failed[gone[0]] = None
                if gone[0] not in {site for site, _ in registered}:
                    metrics.BREAKER_OPEN.remove(gone[0])
            while len(self._failed) > _MOST_REMEMBERED:
                del self._failed[next(iter(self._failed))]
            for life, url in registered.items():
                circuit = self._circuits.get(life) or self._begin(life, url)
                circuit.url = url
                self._change(life, circuit, circuit.breaker.waited(self._clock()))
                if circuit.breaker.due(self._clock()):
                    circuit.breaker = circuit.breaker.probing()
                    self._begin_probe(life, url, circuit.breaker.epoch)

    def admits(self, site: Site) -> int | None:
        """How many requests the engine may be sent now; None for any number."""
        with self._lock:
            circuit = self._circuits.get((site.site, site.boot))
            if circuit is None or self._clock() < circuit.full_until:
                return 0
            return circuit.breaker.admits

    def sent(self, flight: Flight) -> None:
        """A request is about to be posted."""
        with self._lock:
            circuit = self._circuits.get((flight.site, flight.boot))
            if circuit is not None:
                circuit.epochs[str(flight.request)] = circuit.breaker.epoch
                circuit.breaker = circuit.breaker.sent(self._clock())

    def answered(self, flight: Flight, answer: Answer) -> bool:
        """A request ended; this must be told before its sample and its credit may be given out again.

        Returns whether it is suspect: the one request that was to try the engine, after a probe or a restart, and
        failed. A prompt on which an engine fails each time would else be tried for ever.
        """
        life = (flight.site, flight.boot)
        with self._lock:
            circuit = self._circuits.get(life)
            epoch = circuit.epochs.pop(str(flight.request), None) if circuit is not None else None
            if circuit is None or epoch is None:
                return False
            if answer.reason == Reason.NO_ROOM:
                circuit.full_until = self._clock() + _NO_ROOM_SECONDS
            before = circuit.breaker
            if answer.computing:
                self._change(life, circuit, before.answered())
                return False
            # A failure that costs an attempt is enough: a time-out, or what is no answer of an engine.
            self._change(life, circuit, before.failed(epoch, self._clock(), answer.reason, at_once=answer.burns))
            return before.state is State.HALF_OPEN and epoch == before.epoch

    def waiting(self, sites: Sequence[Site]) -> str:
        """Why each of these engines is sent no requests, or one; empty while one of them is sent all.

        Dispatchers say it over each other: it holds nothing that only one of them knows.
        """
        said = []
        with self._lock:
            for site in sites:
                circuit = self._circuits.get((site.site, site.boot))
                if circuit is None or circuit.breaker.state is State.CLOSED:
                    return ""
                said.append(_say(circuit))
        return "; ".join(said)

    def _begin(self, life: _Life, url: str) -> _Circuit:
        # A prompt that kills its engine would kill the next life too, in the company of others.
        again = life[0] in self._failed
        self._failed.pop(life[0], None)
        circuit = self._circuits[life] = _Circuit(url, Breaker.tried() if again else Breaker())
        metrics.BREAKER_OPEN.labels(life[0]).set(0)
        if again:
            log.info("engine was started again after it failed: one request is to try it", site=life[0], url=url)
        return circuit

    def _begin_probe(self, life: _Life, url: str, epoch: int) -> None:
        def body() -> None:
            try:
                problem = self._probe(url)
                with self._lock:
                    circuit = self._circuits.get(life)
                    if circuit is not None:
                        self._change(life, circuit, circuit.breaker.probed(epoch, self._clock(), problem))
            except BaseException as error:  # noqa: BLE001 - the main thread raises it: half a process must not live on
                self._on_crash(error)
            self._wake()

        threading.Thread(target=body, name=f"probe-{life[0]}", daemon=True).start()

    def _change(self, life: _Life, circuit: _Circuit, breaker: Breaker) -> None:
        before, circuit.breaker = circuit.breaker, breaker
        if breaker.epoch == before.epoch:
            return
        metrics.BREAKER_OPEN.labels(life[0]).set(int(breaker.state is State.OPEN))
        known = {"site": life[0], "url": circuit.url}
        match breaker.state:
            case State.OPEN:
                log.warning("engine gets no requests", **known, reason=breaker.why, probe_in_seconds=breaker.wait)
            case State.HALF_OPEN:
                log.info("engine passed a probe: one request is to try it", **known)
            case State.CLOSED:
                log.info("engine gets requests again", **known)


def _say(circuit: _Circuit) -> str:
    if not circuit.breaker.why:
        return f"engine {circuit.url} was started again after it failed, and one request is to try it"
    return (
        f"engine {circuit.url} failed ({circuit.breaker.why}): it is probed until it passes, and then tried with one "
        f"request"
    )

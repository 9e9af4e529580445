"""When an engine that fails gets requests again: a circuit breaker as a table, pure and without a clock."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum

from headrace.errors import IllegalTransition

FAILURES = 3  # in a row
FIRST_WAIT, LONGEST_WAIT = 1.0, 60.0  # seconds until a probe
# After the request that tried an engine failed: for all that is known the engine is well, and the next prompt good.
LONGEST_TRIED_WAIT = 10.0
ANSWER_SECONDS = 20.0  # for a probe, after which SGLang gives its own forward up, and for the request that tries it


class State(StrEnum):
    """What an engine gets: everything, nothing but probes, or one request."""

    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half_open"


class Event(StrEnum):
    """What moves a breaker."""

    ANSWER = "answer"
    """The engine computed something, whatever it was asked before."""
    TRIP = "trip"
    """It failed too often, or in what was to show that it works again."""
    PASS = "pass"
    """It passed a probe."""


# A missing key is an illegal transition: only an open breaker is probed.
TRANSITIONS: dict[State, dict[Event, State]] = {
    State.CLOSED: {Event.ANSWER: State.CLOSED, Event.TRIP: State.OPEN},
    State.OPEN: {Event.ANSWER: State.CLOSED, Event.TRIP: State.OPEN, Event.PASS: State.HALF_OPEN},
    State.HALF_OPEN: {Event.ANSWER: State.CLOSED, Event.TRIP: State.OPEN},
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Breaker:
    """What is known about one life of an engine. Times are the caller's seconds.

    What fails says something about the time when it began: a failure counts only in the `epoch` in which it was begun,
    and each change of state begins another. So sixteen requests that fail at once open the breaker once, and those
    that hung before an engine came back do not close it to others. `busy`: the one probe, or the one request, that the
    state lets through is on its way; the request's answer is awaited until `answer_by`.
    """

    state: State = State.CLOSED
    epoch: int = 0
    failures: int = 0
    why: str = ""
    wait: float = 0.0
    probe_at: float = 0.0
    busy: bool = False
    answer_by: float = 0.0

    @classmethod
    def tried(cls) -> Breaker:
        """Of an engine that was started again after it failed: one request is to show whether that helped."""
        return cls(state=State.HALF_OPEN)

    @property
    def admits(self) -> int | None:
        """How many requests the engine may be sent now; None for any number."""
        return {State.CLOSED: None, State.OPEN: 0, State.HALF_OPEN: 0 if self.busy else 1}[self.state]

    def sent(self, now: float) -> Breaker:
        """A request was sent."""
        return replace(self, busy=True, answer_by=now + ANSWER_SECONDS) if self.state is State.HALF_OPEN else self

    def answered(self) -> Breaker:
        """The engine answered a request, of whatever epoch, in a way that shows it computing."""
        if self.state is State.CLOSED:
            return replace(self, failures=0, why="")
        return Breaker(state=_next(self.state, Event.ANSWER), epoch=self.epoch + 1)

    def failed(self, epoch: int, now: float, why: str, *, at_once: bool = False) -> Breaker:
        """A request that was sent in this epoch failed; `at_once`: one is enough to send no more."""
        if epoch != self.epoch or self.state is State.OPEN:
            return self
        failures = self.failures + 1
        if self.state is State.CLOSED and failures < FAILURES and not at_once:
            return replace(self, failures=failures, why=why)
        return self._tripped(now, failures, why)

    def waited(self, now: float) -> Breaker:
        """Time went by. The request that tries an engine may be lost: without its answer a probe is asked again.

        Its answer, when it comes after all, still closes the breaker; its failure is one of an epoch that is over.
        """
        if self.state is not State.HALF_OPEN or not self.busy or now < self.answer_by:
            return self
        return self._tripped(now, self.failures, f"a request without an answer in {ANSWER_SECONDS:g} s")

    def due(self, now: float) -> bool:
        """Whether the engine is to be probed now."""
        return self.state is State.OPEN and not self.busy and now >= self.probe_at

    def probing(self) -> Breaker:
        """A probe was begun."""
        return replace(self, busy=True)

    def probed(self, epoch: int, now: float, problem: str) -> Breaker:
        """A probe that was begun in this epoch ended; `problem` is empty if the engine passed."""
        if epoch != self.epoch:
            return self
        if problem:
            return self._tripped(now, self.failures, problem)
        return replace(self, state=_next(self.state, Event.PASS), epoch=self.epoch + 1, busy=False)

    def _tripped(self, now: float, failures: int, why: str) -> Breaker:
        longest = LONGEST_TRIED_WAIT if self.state is State.HALF_OPEN else LONGEST_WAIT
        wait = min(longest, 2 * self.wait or FIRST_WAIT)
        return Breaker(
            state=_next(self.state, Event.TRIP),
            epoch=self.epoch + 1,
            failures=failures,
            why=why,
            wait=wait,
            probe_at=now + wait,
        )


def _next(state: State, event: Event) -> State:
    """Look the transition up.

    Raises:
        IllegalTransition: the state does not allow the event.
    """
    try:
        return TRANSITIONS[state][event]
    except KeyError:
        raise IllegalTransition(f"a breaker that is {state} cannot {event}") from None

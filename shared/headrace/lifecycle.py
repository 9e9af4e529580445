"""The life of a sample as a table, and a pure model of it that the Lua scripts must agree with."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum

from headrace.errors import IllegalTransition


class State(StrEnum):
    """Where a sample is. `done` is the end: its manifest line exists.

    `given_up` is the end as well, of a sample that failed, until somebody wants it tried again.
    """

    PENDING = "pending"
    IN_FLIGHT = "in_flight"
    CAPTURED = "captured"
    FAILED = "failed"
    REJECTED = "rejected"
    GIVEN_UP = "given_up"
    DONE = "done"


class Event(StrEnum):
    """What may happen to a sample."""

    CLAIM = "claim"
    """A dispatcher takes the sample for one attempt."""
    RELEASE = "release"
    """The attempt did not count: no room, or a failure of the engine that need not be the sample's."""
    FAIL = "fail"
    """The attempt counts and brought nothing: an error, a refusal, a lapsed lease."""
    EXHAUST = "exhaust"
    """As `fail`, and it was the last attempt."""
    CAPTURE = "capture"
    """A dump of any attempt was proven."""
    STORE = "store"
    """The row and its manifest line exist."""
    REJECT = "reject"
    """The sample can never be extracted."""
    RECORD = "record"
    """The manifest line of a failed or rejected sample exists."""
    REOPEN = "reopen"
    """Somebody wants a sample that failed to be tried again."""


# A missing key is an illegal transition. A valid dump wins until the sample is captured, also from pending; a
# row with its line is accepted from anywhere, since the line is the commit.
TRANSITIONS: dict[State, dict[Event, State]] = {
    State.PENDING: {
        Event.CLAIM: State.IN_FLIGHT,
        Event.CAPTURE: State.CAPTURED,
        Event.STORE: State.DONE,
        Event.REJECT: State.REJECTED,
    },
    State.IN_FLIGHT: {
        Event.RELEASE: State.PENDING,
        Event.FAIL: State.PENDING,
        Event.EXHAUST: State.FAILED,
        Event.CAPTURE: State.CAPTURED,
        Event.STORE: State.DONE,
    },
    State.CAPTURED: {
        Event.FAIL: State.PENDING,
        Event.EXHAUST: State.FAILED,
        Event.STORE: State.DONE,
    },
    State.FAILED: {Event.RECORD: State.GIVEN_UP, Event.STORE: State.DONE, Event.REOPEN: State.PENDING},
    State.REJECTED: {Event.RECORD: State.DONE, Event.STORE: State.DONE},
    State.GIVEN_UP: {Event.STORE: State.DONE, Event.REOPEN: State.PENDING},
    State.DONE: {},
}


def next_state(state: State, event: Event) -> State:
    """Look the transition up.

    Raises:
        IllegalTransition: the state does not allow the event.
    """
    try:
        return TRANSITIONS[state][event]
    except KeyError:
        raise IllegalTransition(f"a sample that is {state} cannot {event}") from None


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """A sample's state, the attempts burnt, and the request that is in flight (`live`) or whose dump won (`captured`).

    A failed sample keeps its last request as `live`. `job` is k, the number of the captured request's storage job;
    it never comes back for a request, so that no earlier job can be taken for the current one.
    """

    state: State = State.PENDING
    attempts: int = 0
    live: str = ""
    captured: str = ""
    job: int = 0

    def claim(self, request: str) -> Sample:
        """Open an attempt."""
        state = next_state(self.state, Event.CLAIM)
        return replace(self, state=state, attempts=self.attempts + 1, live=request)

    def end_attempt(self, *, burn: bool, max_attempts: int) -> Sample:
        """Close the live attempt, or the captured one whose dump is gone, which always burns, without a row."""
        burn = burn or self.state is State.CAPTURED
        attempts = self.attempts if burn else self.attempts - 1
        event = Event.EXHAUST if attempts >= max_attempts else Event.FAIL if burn else Event.RELEASE
        state = next_state(self.state, event)
        last = (self.live or self.captured) if state is State.FAILED else ""
        return replace(self, state=state, attempts=attempts, live=last, captured="", job=0)

    def capture(self, request: str, job: int = 1) -> Sample:
        """A dump of `request` was proven; it wins over the live attempt. `job` is the request's next k."""
        return replace(self, state=next_state(self.state, Event.CAPTURE), live="", captured=request, job=job)

    def reopen_job(self) -> Sample:
        """The storing lease lapsed: open the next storage job for the same dump."""
        if self.state is not State.CAPTURED:
            raise IllegalTransition(f"a sample that is {self.state} has no storage job")
        return replace(self, job=self.job + 1)

    def store(self) -> Sample:
        """The row and its line exist."""
        return replace(self, state=next_state(self.state, Event.STORE), live="", captured="")

    def reject(self) -> Sample:
        """The sample can never be extracted."""
        return replace(self, state=next_state(self.state, Event.REJECT), live="")

    def record(self) -> Sample:
        """The line of a failed or rejected sample exists."""
        return replace(self, state=next_state(self.state, Event.RECORD))

    def reopen(self) -> Sample:
        """Try a sample that failed again, with all its attempts."""
        return replace(self, state=next_state(self.state, Event.REOPEN), attempts=0, live="")

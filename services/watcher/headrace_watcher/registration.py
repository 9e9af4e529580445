"""Whether an engine may be given requests: a table of states, and values that evolve; no clock, no I/O."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum

from headrace.dumps import EngineCard
from headrace.errors import IllegalTransition

MISSES = 2  # health checks that must fail in a row before an engine counts as gone
MAX_BACKOFF = 60.0


class State(StrEnum):
    """Where an engine is on its way to requests."""

    NO_CARD = "no_card"
    """No engine with capture has started on this folder."""
    WAITING = "waiting"
    """There is a card; the engine must answer its health check."""
    PROVING = "proving"
    """The engine answers; a canary must come through capture."""
    REGISTERED = "registered"
    """A canary matched: the engine may be given requests."""


class Event(StrEnum):
    """What may happen to an engine."""

    CARD = "card"
    """A card that differs from the known one."""
    NO_CARD = "no_card"
    HEALTHY = "healthy"
    GONE = "gone"
    """Its health check failed, `MISSES` times in a row once it had answered."""
    PROVEN = "proven"
    UNPROVEN = "unproven"


# A missing key is an illegal transition.
TRANSITIONS: dict[State, dict[Event, State]] = {
    State.NO_CARD: {
        Event.CARD: State.WAITING,
        Event.NO_CARD: State.NO_CARD,
        Event.HEALTHY: State.NO_CARD,
        Event.GONE: State.NO_CARD,
    },
    State.WAITING: {
        Event.CARD: State.WAITING,
        Event.NO_CARD: State.NO_CARD,
        Event.HEALTHY: State.PROVING,
        Event.GONE: State.WAITING,
    },
    State.PROVING: {
        Event.CARD: State.WAITING,
        Event.NO_CARD: State.NO_CARD,
        Event.HEALTHY: State.PROVING,
        Event.GONE: State.WAITING,
        Event.PROVEN: State.REGISTERED,
        Event.UNPROVEN: State.WAITING,
    },
    State.REGISTERED: {
        Event.CARD: State.WAITING,
        Event.NO_CARD: State.NO_CARD,
        Event.HEALTHY: State.REGISTERED,
        Event.GONE: State.WAITING,
    },
}


def next_state(state: State, event: Event) -> State:
    """Look the transition up.

    Raises:
        IllegalTransition: the state does not allow the event.
    """
    try:
        return TRANSITIONS[state][event]
    except KeyError:
        raise IllegalTransition(f"an engine that is {state} cannot be {event}") from None


def backoff(failures: int) -> float:
    """Seconds before the next canary after so many in a row failed: 1, 2, 4, ... and at most a minute."""
    return min(MAX_BACKOFF, 2.0 ** min(failures - 1, 10)) if failures else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Registration:
    """An engine's way to requests.

    `misses` and `failures` count health checks and canaries that failed in a row; no canary is sent before
    `not_before` (in the caller's seconds). `engine` and `canary` say what is missing; both are empty once registered.
    """

    state: State = State.NO_CARD
    card: EngineCard | None = None
    misses: int = 0
    failures: int = 0
    not_before: float = 0.0
    engine: str = (
        "no engine has started on this dump folder: is the plugin in the server's environment, and its "
        "HEADRACE_DUMP_DIR this folder?"
    )
    canary: str = "not sent yet"

    @property
    def is_registered(self) -> bool:
        """Whether the engine may be given requests."""
        return self.state is State.REGISTERED

    @property
    def missing(self) -> str:
        """Why the engine may not be given requests; empty once it may."""
        return self.engine or self.canary

    def see_card(self, card: EngineCard | None, problem: str = "") -> Registration:
        """The engine's card as it is now, or None and why; another card is another life, to be proven anew."""
        if card is None:
            state = next_state(self.state, Event.NO_CARD)
            return Registration(state=state, engine=problem or Registration().engine)
        if card == self.card:
            return self
        state = next_state(self.state, Event.CARD)
        return Registration(state=state, card=card, engine="its health was not checked yet")

    def see_health(self, problem: str) -> Registration:
        """A health check's result; an empty problem is a 200."""
        if not problem:
            state = next_state(self.state, Event.HEALTHY)
            return replace(self, state=state, misses=0, engine="" if self.card else self.engine)
        misses = self.misses + 1
        if self.state in (State.PROVING, State.REGISTERED) and misses < MISSES:
            return replace(self, misses=misses)
        state = next_state(self.state, Event.GONE)
        left = self.state is State.REGISTERED and state is not State.REGISTERED
        return replace(
            self,
            state=state,
            misses=misses,
            engine=problem if self.card else self.engine,
            canary="to be sent again when the engine answers" if left else self.canary,
        )

    def may_send(self, now: float) -> bool:
        """Whether a canary is to be sent now, if none is under way."""
        return self.state is State.PROVING and now >= self.not_before

    def proven(self) -> Registration:
        """The canary matched."""
        state = next_state(self.state, Event.PROVEN)
        return replace(self, state=state, failures=0, not_before=0.0, canary="")

    def unproven(self, problem: str, now: float) -> Registration:
        """The canary failed: the next one waits, longer each time."""
        state = next_state(self.state, Event.UNPROVEN)
        failures = self.failures + 1
        return replace(self, state=state, failures=failures, not_before=now + backoff(failures), canary=problem)

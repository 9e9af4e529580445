from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from headrace.errors import IllegalTransition
from headrace.lifecycle import TRANSITIONS, Event, Sample, State, next_state


def test_every_state_has_a_row_and_each_leads_to_the_end() -> None:
    assert set(TRANSITIONS) == set(State)
    reaching = {State.DONE}
    for _ in State:
        reaching |= {state for state, events in TRANSITIONS.items() if set(events.values()) & reaching}
    assert reaching == set(State)


def test_done_is_for_good() -> None:
    assert TRANSITIONS[State.DONE] == {}
    for event in Event:
        with pytest.raises(IllegalTransition, match="done"):
            next_state(State.DONE, event)


def test_a_missing_key_is_an_illegal_transition() -> None:
    legal = {(state, event) for state, events in TRANSITIONS.items() for event in events}
    for state in State:
        for event in Event:
            if (state, event) not in legal:
                with pytest.raises(IllegalTransition):
                    next_state(state, event)


def test_the_life_of_a_sample_that_is_stored() -> None:
    sample = Sample().claim("r1")
    assert (sample.state, sample.attempts, sample.live) == (State.IN_FLIGHT, 1, "r1")
    sample = sample.capture("r1")
    assert (sample.state, sample.live, sample.captured, sample.job) == (State.CAPTURED, "", "r1", 1)
    sample = sample.reopen_job()
    assert sample.job == 2
    assert sample.store().state is State.DONE


def test_an_attempt_that_did_not_count_gives_the_sample_back_as_it_was() -> None:
    assert Sample().claim("r1").end_attempt(burn=False, max_attempts=1) == Sample()


def test_the_last_attempt_fails_the_sample_and_keeps_its_request() -> None:
    sample = Sample().claim("r1").end_attempt(burn=True, max_attempts=2)
    assert (sample.state, sample.attempts, sample.live) == (State.PENDING, 1, "")
    sample = sample.claim("r2").end_attempt(burn=True, max_attempts=2)
    assert (sample.state, sample.attempts, sample.live) == (State.FAILED, 2, "r2")
    assert sample.record().state is State.GIVEN_UP
    assert sample.store().state is State.DONE


def test_a_sample_that_failed_may_be_tried_again_with_all_its_attempts() -> None:
    failed = Sample().claim("r1").end_attempt(burn=True, max_attempts=1)
    for sample in (failed, failed.record()):
        assert sample.reopen() == Sample()
        assert sample.store().state is State.DONE


def test_a_captured_dump_that_goes_always_burns() -> None:
    sample = Sample().claim("r1").capture("r1")
    assert sample.end_attempt(burn=False, max_attempts=1).state is State.FAILED
    assert sample.end_attempt(burn=False, max_attempts=2).attempts == 1


def test_a_late_dump_wins_also_from_pending_and_over_the_live_attempt() -> None:
    pending = Sample().claim("r1").end_attempt(burn=True, max_attempts=3)
    assert pending.capture("r1").captured == "r1"
    won = pending.claim("r2").capture("r1")
    assert (won.captured, won.live) == ("r1", "")


def test_what_a_state_does_not_allow_is_refused() -> None:
    for wrong in (
        lambda: Sample().reopen_job(),
        lambda: Sample().record(),
        lambda: Sample().end_attempt(burn=True, max_attempts=1),
        lambda: Sample().claim("r1").claim("r2"),
        lambda: Sample().claim("r1").reject(),
        lambda: Sample().reject().capture("r1"),
        lambda: Sample().claim("r1").capture("r1").capture("r1"),
        lambda: Sample().store().store(),
        lambda: Sample().store().reopen(),
        lambda: Sample().reject().record().reopen(),
    ):
        with pytest.raises(IllegalTransition):
            wrong()


class OneSample(RuleBasedStateMachine):
    """One sample with its dispatcher, engine, watcher and writers, any of which may be late, wrong or gone.

    The engine computes right or wrong states; a watcher captures only what it proved; a writer makes a row only of
    the dump that it was told is the captured one, but may be slow to do so.
    """

    @initialize(max_attempts=st.integers(1, 4))
    def begin(self, max_attempts: int) -> None:
        self.sample = Sample()
        self.max_attempts = max_attempts
        self.right: dict[str, bool] = {}  # every request ever made, and whether its states are its tokens'
        self.credits: set[str] = set()  # requests that hold room at the engine
        self.dumps: set[str] = set()
        self.jobs: set[tuple[str, int]] = set()
        self.writing: set[str] = set()
        self.row = ""

    def _pick(self, names: set[str], pick: int) -> str:
        return sorted(names)[pick % len(names)]

    @precondition(lambda self: self.sample.state is State.PENDING)
    @rule(right=st.booleans())
    def claim(self, right: bool) -> None:
        request = f"r{len(self.right):03d}"
        self.right[request] = right
        self.credits.add(request)
        self.sample = self.sample.claim(request)

    @precondition(lambda self: self.right)
    @rule(pick=st.integers(0, 20))
    def dump(self, pick: int) -> None:
        """A dump appears, perhaps long after its attempt was given up."""
        self.dumps.add(self._pick(set(self.right), pick))

    @precondition(lambda self: self.dumps)
    @rule(pick=st.integers(0, 20))
    def judge(self, pick: int) -> None:
        request = self._pick(self.dumps, pick)
        if not self.right[request]:
            self.dumps.discard(request)
            self._end(request, burn=True)
        elif self.sample.state in (State.PENDING, State.IN_FLIGHT):
            self.sample = self.sample.capture(request)
            self.credits.discard(request)
            self.jobs.add((request, self.sample.job))

    @precondition(lambda self: self.jobs)
    @rule(pick=st.integers(0, 20))
    def begin_store(self, pick: int) -> None:
        """A writer takes any job, old ones too, and goes on only with the current one."""
        request, job = sorted(self.jobs)[pick % len(self.jobs)]
        if (self.sample.captured, self.sample.job) == (request, job) and request in self.dumps:
            self.writing.add(request)

    @precondition(lambda self: self.writing)
    @rule(pick=st.integers(0, 20), dies=st.booleans())
    def store(self, pick: int, dies: bool) -> None:
        """The writer publishes the row unless there is one, and its line, which is accepted from any state."""
        request = self._pick(self.writing, pick)
        self.writing.discard(request)
        if not dies:
            self.row = self.row or request
            if self.sample.state is not State.DONE:
                self.sample = self.sample.store()

    @precondition(lambda self: self.sample.state is State.CAPTURED)
    @rule(gone=st.booleans())
    def lapse(self, gone: bool) -> None:
        request = self.sample.captured
        if gone:
            self.dumps.discard(request)
            self._end(request, burn=True)
        else:
            self.sample = self.sample.reopen_job()
            self.jobs.add((request, self.sample.job))

    @precondition(lambda self: self.right)
    @rule(pick=st.integers(0, 20), burn=st.booleans())
    def end(self, pick: int, burn: bool) -> None:
        """The dispatcher or the reaper gives any attempt up, perhaps a second time."""
        request = self._pick(set(self.right), pick)
        if request != self.sample.captured:
            self._end(request, burn=burn)

    def _end(self, request: str, *, burn: bool) -> None:
        self.credits.discard(request)
        live = self.sample.state is State.IN_FLIGHT and self.sample.live == request
        captured = self.sample.state is State.CAPTURED and self.sample.captured == request
        if live or captured:
            self.sample = self.sample.end_attempt(burn=burn, max_attempts=self.max_attempts)

    @precondition(lambda self: self.sample.state is State.PENDING)
    @rule()
    def reject(self) -> None:
        self.sample = self.sample.reject()

    @precondition(lambda self: self.sample.state in (State.FAILED, State.REJECTED))
    @rule()
    def record(self) -> None:
        self.sample = self.sample.record()

    @precondition(lambda self: self.sample.state is State.GIVEN_UP)
    @rule()
    def reopen(self) -> None:
        self.sample = self.sample.reopen()

    @precondition(lambda self: self.sample.state is State.DONE)
    @rule(event=st.sampled_from(Event))
    def nothing_follows_the_end(self, event: Event) -> None:
        with pytest.raises(IllegalTransition):
            next_state(self.sample.state, event)

    @invariant()
    def no_row_of_wrong_states(self) -> None:
        if hasattr(self, "sample"):
            assert not self.row or self.right[self.row]

    @invariant()
    def attempts_stay_within_their_limit(self) -> None:
        if hasattr(self, "sample"):
            assert 0 <= self.sample.attempts <= self.max_attempts
            assert self.sample.state is not State.PENDING or self.sample.attempts < self.max_attempts

    @invariant()
    def what_is_in_flight_holds_a_credit(self) -> None:
        if hasattr(self, "sample") and self.sample.state is State.IN_FLIGHT:
            assert self.sample.live in self.credits

    def teardown(self) -> None:
        """From wherever it stopped, the sample ends and no credit stays."""
        if not hasattr(self, "sample"):
            return
        for request in sorted(self.credits):
            self._end(request, burn=True)
        assert not self.credits
        for _ in range(3 * self.max_attempts):
            match self.sample.state:
                case State.PENDING:
                    self.sample = self.sample.claim("last").capture("last")
                case State.CAPTURED:
                    self.sample = self.sample.store()
                case State.FAILED | State.REJECTED:
                    self.sample = self.sample.record()
                case _:
                    break
        assert self.sample.state in (State.GIVEN_UP, State.DONE)


OneSample.TestCase.settings = settings(max_examples=80, stateful_step_count=30)
test_no_sequence_of_events_stores_wrong_states_or_loses_the_sample = OneSample.TestCase

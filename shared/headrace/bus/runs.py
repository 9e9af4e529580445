"""Runs on the bus: create, feed, count, pause, and mark what the manifest says is done."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from itertools import islice
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import orjson

from headrace.bus import keys
from headrace.bus.client import text
from headrace.bus.values import RunState, RunView, Window
from headrace.manifest import Line
from headrace.runs import Identity, RunSpec

if TYPE_CHECKING:
    from headrace.bus import Bus

_T = TypeVar("_T")
_BATCH = 500  # samples in a call
_PARTS = (
    keys.pending,
    keys.opened,
    keys.in_flight,
    keys.recording,
    keys.done,
    keys.failed,
    keys.spared,
    keys.dead,
)
_RATE_MS = 15_000  # between two notes; a rate is over one to two of them


class Runs:
    """What concerns a run as a whole."""

    def __init__(self, bus: Bus) -> None:
        """Work over this bus."""
        self._bus = bus

    def create(self, spec: RunSpec) -> Literal["created", "same", "other", "moved"]:
        """Create the run in state `rebuilding`; `other` when the name is taken by another extraction.

        `moved`: its output is another folder than before, and rows may still be on their way there.

        A run that exists keeps its state, except that a cancelled one is `rebuilding` again: it may have been cancelled
        before it was rebuilt.
        """
        arguments = (spec.run, spec.encode(), spec.digest, spec.total, spec.max_attempts, spec.output)
        return self._bus.call("create_run", *arguments).decode()  # type: ignore[no-any-return]

    def names(self) -> list[str]:
        """Names of all runs, sorted; names of expired ones are dropped."""
        return sorted(name.decode() for name in self._bus.call("run_names"))

    def get(self, name: str) -> RunView | None:
        """The run as it is now; None when Redis does not know it."""
        with self._guard(), self._bus.redis.pipeline(transaction=False) as pipe:
            pipe.hgetall(keys.run(name))
            pipe.llen(keys.pending(name))
            pipe.zcard(keys.in_flight(name))
            pipe.hlen(keys.opened(name))
            table, pending, in_flight, fed = pipe.execute()
        if b"spec" not in table:
            return None
        return _view({key.decode(): value for key, value in table.items()}, pending, in_flight, fed)

    def spec(self, name: str) -> RunSpec | None:
        """The run's spec alone."""
        with self._guard():
            data: Any = self._bus.redis.hget(keys.run(name), "spec")
        return RunSpec.decode(data) if data else None

    def identity(self, name: str) -> Identity | None:
        """The engine and weights of the run's first row, once there is one."""
        with self._guard():
            engine, weights = self._bus.redis.hmget(keys.run(name), "engine", "weight_version")
        return Identity(engine=text(engine), weight_version=text(weights)) if engine else None

    def set_identity(self, name: str, identity: Identity) -> None:
        """Set the identity where none is set; used when a run is rebuilt from its dataset."""
        with self._guard(), self._bus.redis.pipeline() as pipe:
            pipe.hsetnx(keys.run(name), "engine", identity.engine)
            pipe.hsetnx(keys.run(name), "weight_version", identity.weight_version)
            pipe.execute()

    def activate(self, name: str, *, paused_for: str = "") -> RunState | None:
        """Leave `rebuilding`, or go on after a pause, with a new window of verdicts.

        With `paused_for`, only where that is the pause's reason, and the window goes on as well.
        """
        return self._set(name, "active", "", "rebuilding", "paused", only=paused_for)

    def pause(self, name: str, reason: str, *, by_hand: bool = False) -> RunState | None:
        """Stop giving out samples; what is in flight ends. Returns the state that holds now.

        A pause by hand takes the place of another one, which might end by itself; no other pause does.
        """
        return self._set(name, "paused", reason, "active", *(("paused",) if by_hand else ()))

    def pause_for(self, name: str, reason: str, window: Window) -> bool:
        """Pause an active run for what the verdicts of this window came to.

        False when it has another window by now, or nothing is left to give out.
        """
        return bool(self._bus.call("pause_window", name, reason, window.since))

    def cancel(self, name: str) -> RunState | None:
        """Stop for good, until the run is submitted again. Returns the state that holds now."""
        return self._set(name, "cancelled", "", "active", "paused", "rebuilding")

    def keep_to(self, name: str, site: str, seconds: float) -> None:
        """Have one site alone serve a run that was created and not activated yet, and end it after so many seconds.

        Whoever has a run for itself ends it; the end by time is for one that was killed.
        """
        until = round((self._bus.server_clock()[1] + seconds) * 1000)
        with self._guard():
            self._bus.redis.hset(keys.run(name), mapping={"only_site": site, "only_until": until})

    def states(self, name: str) -> Counter[str]:
        """How many of the samples that were fed and are not done are in each state. Reads them all: for small runs."""
        with self._guard():
            samples: Any = self._bus.redis.hvals(keys.opened(name))
        return Counter(text(sample).partition("|")[0] for sample in samples)

    def expire(self, name: str, ttl: float) -> None:
        """Forget a run that has ended `ttl` seconds from now, however it ended."""
        with self._guard(), self._bus.redis.pipeline() as pipe:
            for key in (keys.run, *_PARTS):
                pipe.pexpire(key(name), round(ttl * 1000))
            pipe.execute()

    def expire_rest(self, name: str) -> None:
        """Have expire with its run what came to it since `expire`, as a row that was stored late leaves it."""
        with self._guard():
            left = self._bus.redis.pttl(keys.run(name))
            if left <= 0:
                return
            with self._bus.redis.pipeline() as pipe:
                for key in _PARTS:
                    pipe.pexpire(key(name), left)
                pipe.execute()

    def feed(self, name: str, cursor: int, entries: Sequence[str]) -> int | None:
        """Make the samples from `cursor` on pending; an entry is empty, or the reason of a rejection.

        Returns the new cursor; None when another dispatcher moved it, or the run is not active.
        """
        reached = int(self._bus.call("feed", name, cursor, *entries))
        return reached if reached >= 0 else None

    def pending(self, name: str, most: int, skip: int = 0) -> list[int]:
        """The next ordinals that may be claimed."""
        if most <= 0:
            return []
        with self._guard():
            return [int(ordinal) for ordinal in self._bus.redis.lrange(keys.pending(name), skip, skip + most - 1)]

    def mark_done(self, name: str, lines: Iterable[Line]) -> int:
        """Mark samples done by their manifest lines; one that is done already is not counted twice.

        A sample that was reopened is not closed by the line of its earlier failure. One that is done by a failure
        becomes stored or rejected by such a line, which counts as new.
        """
        new = 0
        for batch in _batches(lines):
            entries = list[str | int]()
            for line in batch:
                entries += (line.ordinal, line.status, line.tokens, line.bytes, line.reason, line.request)
            new += self._bus.call("mark_done", name, *entries)
        return new

    def note_failed(self, name: str, lines: Iterable[Line]) -> None:
        """Note the reasons of samples that an earlier version closed by a failure, for `reopen`.

        `lines` are the newest ones of the samples that have failed lines alone.
        """
        for batch in _batches(lines):
            entries = list[str | int]()
            for line in batch:
                entries += (line.ordinal, line.reason)
            self._bus.call("note_failed", name, *entries)

    def failed(self, name: str) -> list[int]:
        """Ordinals of the samples that failed, their lines written or not, with those that are tried again already."""
        with self._guard():
            # Asked for first: one whose line is marked meanwhile is among the noted ones then.
            waiting: Any = self._bus.redis.zrange(keys.recording(name), 0, -1)
            samples: Any = self._bus.redis.hmget(keys.opened(name), waiting) if waiting else []
            noted: Any = self._bus.redis.hkeys(keys.failed(name))
        unwritten = (o for o, sample in zip(waiting, samples, strict=True) if (sample or b"").startswith(b"failed|"))
        return sorted({int(ordinal) for ordinal in (*noted, *unwritten)})

    def reopen(self, name: str, ordinals: Iterable[int]) -> dict[int, str]:
        """Extract those of the samples again that failed, their lines written or not; a finished run is active again.

        Returns those that are open after a failure, also if they were reopened before, and the failures' reasons.
        """
        reopened = dict[int, str]()
        for batch in _batches(ordinals):
            answer = [value.decode() for value in self._bus.call("reopen", name, *batch)]
            reopened |= zip(map(int, answer[::2]), answer[1::2], strict=True)
        return reopened

    def say_waiting(self, name: str, what: str) -> None:
        """Say, for `status`, what the run waits for; empty when for nothing."""
        with self._guard():
            if self._bus.redis.exists(keys.run(name)):
                self._bus.redis.hset(keys.run(name), "waiting_for", what)

    def mark_rate(self, name: str) -> None:
        """Note what is stored now, for a rate over the next while; the reaper calls it with each pass."""
        self._bus.call("mark_rate", name, _RATE_MS)

    def mark_verdicts(self, name: str, least: int) -> None:
        """Have the window begin later once `least` verdicts came since it could; the reaper calls it with each pass.

        So a window has `least` to twice as many verdicts, and those that come between two passes.
        """
        self._bus.call("mark_verdicts", name, least)

    def dead(self, name: str, most: int = 100) -> list[tuple[str, int, str]]:
        """The latest burnt attempts: request id, attempt, reason."""
        with self._guard():
            entries: Any = self._bus.redis.xrevrange(keys.dead(name), count=most)
        return [(f[b"request"].decode(), int(f[b"attempt"]), f[b"reason"].decode()) for _, f in entries]

    def _set(self, name: str, state: RunState, reason: str, *allowed: RunState, only: str = "") -> RunState | None:
        answer = self._bus.call("set_state", name, state, reason, only, *allowed)
        return answer.decode() if answer else None

    def _guard(self) -> AbstractContextManager[None]:
        return self._bus.guard()


def _batches(values: Iterable[_T]) -> Iterator[list[_T]]:
    rest = iter(values)
    while batch := list(islice(rest, _BATCH)):
        yield batch


def _view(table: dict[str, bytes], pending: int, in_flight: int, fed: int) -> RunView:
    def number(name: str) -> int:
        return int(table.get(name, b"0"))

    def text(name: str) -> str:
        return table.get(name, b"").decode()

    def counts(prefix: str) -> dict[str, int]:
        found = {name.removeprefix(prefix): int(value) for name, value in table.items() if name.startswith(prefix)}
        return dict(sorted(found.items()))

    state: Any = text("state")
    engine = table.get("engine")
    finished, reopened = table.get("finished_at"), table.get("reopened_at")
    return RunView(
        spec=RunSpec.decode(table["spec"]),
        state=state,
        reason=text("reason"),
        cursor=number("cursor"),
        stored=number("stored"),
        rejected=number("rejected"),
        failed=number("failed"),
        tokens=number("tokens"),
        bytes=number("bytes"),
        verdicts=number("verdicts"),
        mismatches=number("mismatches"),
        reasons=counts("reason:"),
        rejected_by=counts("rejected:"),
        failed_by=counts("failed:"),
        identity=Identity(engine=engine.decode(), weight_version=text("weight_version")) if engine else None,
        pending=pending,
        in_flight=in_flight,
        fed=fed,
        waiting_for=text("waiting_for"),
        only_site=text("only_site"),
        only_until=int(table["only_until"]) / 1000 if "only_until" in table else None,
        created_at=number("created_at") / 1000,
        reopened_at=int(reopened) / 1000 if reopened else None,
        finished_at=int(finished) / 1000 if finished else None,
        rate_since=number("rate_since") / 1000,
        rate_rows=number("rate_rows"),
        rate_tokens=number("rate_tokens"),
        window=_window(table.get("window", b"{}"), number, counts("first_reason:")),
    )


def _window(note: bytes, number: Callable[[str], int], reasons: Mapping[str, int]) -> Window:
    noted: dict[str, int] = orjson.loads(note)
    since = noted.get("first_verdicts", 0)
    newer = {reason: count - noted.get(f"first_reason:{reason}", 0) for reason, count in reasons.items()}
    return Window(
        since=since,
        verdicts=number("first_verdicts") - since,
        mismatches=number("first_mismatches") - noted.get("first_mismatches", 0),
        reasons={reason: count for reason, count in newer.items() if count},
    )

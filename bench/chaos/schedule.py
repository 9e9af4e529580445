"""Which faults a run meets, in which order: a pure function of the seed."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

Kind = Literal["kill", "stop", "long stop", "set back", "emptied"]
PROCESSES = ("redis", "engine", "watcher", "writer", "dispatcher")
FEWEST = 2  # the two losses of Redis

_PAIRED = frozenset({"writer", "dispatcher"})
_OVERLAPPING = 0.2  # of the faults: the next one does not wait until the run has recovered
_COPY_AGE = (1.0, 3.0)  # seconds that Redis loses when it is set back
_DOWN = (0.0, 1.5)  # seconds until a process that was killed is started again


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One fault. `seconds` is how long the process is away, or for a Redis that is set back, what it forgets.

    `process` is a service of `PROCESSES` or, of those that run twice, its second one. `overlaps`: the next fault comes
    as soon as it is due.
    """

    kind: Kind
    process: str
    seconds: float
    overlaps: bool


def twin(process: str) -> str | None:
    """The other one of a process that runs twice."""
    name, _, second = process.partition("-")
    if name not in _PAIRED:
        return None
    return name if second else f"{name}-2"


def draw(seed: int, count: int, shortest_lease: float, longest_lease: float) -> list[Fault]:
    """`count` faults (`FEWEST` or more): every kind for every process in turn, and Redis set back once, emptied once.

    A stop is well within the shortest lease, a long one outlasts the longest; both are given in seconds.
    """
    rng = random.Random(seed)
    kinds = _shuffled_rounds(rng)
    faults = []
    for _ in range(count - FEWEST):
        kind, process = next(kinds)
        second = twin(process)
        if second is not None and rng.random() < 0.5:
            process = second
        if kind == "kill":
            seconds = rng.uniform(*_DOWN)
        elif kind == "stop":
            seconds = rng.uniform(0.2, 0.6) * shortest_lease
        else:
            seconds = longest_lease + rng.uniform(0.5, 2.0)
        faults.append(Fault(kind=kind, process=process, seconds=seconds, overlaps=rng.random() < _OVERLAPPING))
    # In the middle, so that there is something to lose and something left to do.
    losses: list[Literal["set back", "emptied"]] = ["set back", "emptied"]
    rng.shuffle(losses)
    faults.insert(round(len(faults) * rng.uniform(0.2, 0.45)), _loss(rng, losses[0]))
    faults.insert(round(len(faults) * rng.uniform(0.55, 0.8)), _loss(rng, losses[1]))
    return faults


def _shuffled_rounds(rng: random.Random) -> Iterator[tuple[Kind, str]]:
    kinds: tuple[Kind, ...] = ("kill", "stop", "long stop")
    every = [(kind, process) for kind in kinds for process in PROCESSES]
    while True:
        rng.shuffle(every)
        yield from every


def _loss(rng: random.Random, kind: Literal["set back", "emptied"]) -> Fault:
    seconds = rng.uniform(*(_COPY_AGE if kind == "set back" else _DOWN))
    return Fault(kind=kind, process="redis", seconds=seconds, overlaps=False)

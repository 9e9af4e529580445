from __future__ import annotations

from collections import Counter
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.chaos.schedule import FEWEST, PROCESSES, draw, twin

SHORTEST, LONGEST = 4.0, 6.0


@given(st.integers(0, 2**32), st.integers(FEWEST, 200))
def test_a_schedule_follows_from_its_seed_and_has_as_many_faults_as_were_asked_for(seed: int, count: int) -> None:
    faults = draw(seed, count, SHORTEST, LONGEST)
    assert faults == draw(seed, count, SHORTEST, LONGEST)
    assert len(faults) == count
    kinds = Counter(fault.kind for fault in faults)
    assert (kinds["set back"], kinds["emptied"]) == (1, 1)
    for fault in faults:
        assert fault.process == "redis" or fault.kind not in ("set back", "emptied")
        assert fault.kind != "stop" or fault.seconds < SHORTEST
        assert fault.kind != "long stop" or fault.seconds > LONGEST


@given(st.integers(0, 2**32))
def test_every_process_is_killed_and_stopped_for_short_and_for_long_in_each_round(seed: int) -> None:
    every = {(kind, process) for kind, process in product(("kill", "stop", "long stop"), PROCESSES)}
    faults = draw(seed, FEWEST + 2 * len(every), SHORTEST, LONGEST)
    met = Counter((fault.kind, fault.process.removesuffix("-2")) for fault in faults)
    assert {pair: met[pair] for pair in every} == dict.fromkeys(every, 2)


@pytest.mark.parametrize(
    ("process", "other"), [("writer", "writer-2"), ("dispatcher-2", "dispatcher"), ("redis", None), ("engine", None)]
)
def test_writers_and_dispatchers_run_twice(process: str, other: str | None) -> None:
    assert twin(process) == other

"""The oracle of the chaos run sees what is left in Redis."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from bench.chaos.checks import Check, in_redis, settled
from headrace.bus import Bus
from headrace.manifest import MANIFEST_FOLDER
from headrace.messages import StoreJob
from tests.support.bus_values import RUN, SITE, capture, claim, make_attempt, make_line, start_run

pytestmark = pytest.mark.redis

TOTAL = 3


@pytest.fixture
def output(bus: Bus, tmp_path: Path) -> Path:
    """A run of which every sample is stored, and its manifest."""
    start_run(bus, total=TOTAL, fed=TOTAL)
    lines = [make_line(ordinal) for ordinal in range(TOTAL)]
    bus.runs.mark_done(RUN, lines)
    (tmp_path / MANIFEST_FOLDER).mkdir()
    (tmp_path / MANIFEST_FOLDER / "a.jsonl").write_bytes(b"".join(line.encode() for line in lines))
    return tmp_path


def found(checks: Sequence[Check]) -> dict[str, int]:
    return {check.what: check.found for check in checks if check.found}


def test_nothing_is_found_when_all_came_to_its_end(bus: Bus, output: Path) -> None:
    assert found(settled(bus, RUN, output, 0)) == {}
    assert found(in_redis(bus, RUN, output, 0)) == {}


def test_what_is_still_held_is_found(bus: Bus, tmp_path: Path) -> None:
    start_run(bus, total=TOTAL, fed=TOTAL)
    first, _ = claim(bus, make_attempt(0), make_attempt(1))
    capture(bus, first)
    (tmp_path / f"{first}.safetensors").write_bytes(bytes(100))
    assert found(settled(bus, RUN, tmp_path, 0)) == {
        "runs not finished": 1,
        "credits": 1,
        "leases": 3,
        "samples fed and not done": TOTAL,
        "dumps and unfinished files": 1,
        "bytes of dumps": 100,
    }


def test_books_that_differ_from_the_manifest_are_found(bus: Bus, output: Path) -> None:
    bus.redis.hincrby(f"hr:run:{RUN}", "stored", 1)
    (check,) = [check for check in in_redis(bus, RUN, output, 0) if "differ" in check.what]
    assert check.examples == ("stored: Redis 4, manifest 3",)


def test_keys_that_nobody_named_and_those_that_would_stay_for_ever_are_found(bus: Bus, output: Path) -> None:
    bus.redis.set("hr:other", 1, ex=60)
    bus.redis.hset(f"hr:req:{make_attempt(0).request}", "site", SITE)
    bus.redis.hset("hr:site:gone:credits", "request", "1 1 1")
    bus.redis.set("rq:job:one", 1)
    (check,) = [check for check in in_redis(bus, RUN, output, 0) if "keys" in check.what]
    assert check.found == 4


@pytest.mark.parametrize(("broken_off", "beyond"), [(3, 0), (2, 1), (0, 3)])
def test_rq_keeps_no_more_jobs_than_faults_broke_off(bus: Bus, output: Path, broken_off: int, beyond: int) -> None:
    queue = bus.jobs.rq_queue(SITE)
    bus.redis.zadd(queue.started_job_registry.key, {"started:1": time.time() + 3660})
    bus.redis.zadd(queue.failed_job_registry.key, {"failed": time.time() + 600})
    job = StoreJob(request=make_attempt(0).request, sample="s0", job=1, mask=(1, 2), engine="e", weight_version="w")
    assert bus.jobs.queue_store(SITE, job)
    bus.redis.lmove(queue.key, queue.intermediate_queue_key)  # taken, and its worker is killed
    checks = in_redis(bus, RUN, output, broken_off)
    assert found(checks) == ({"jobs that RQ keeps beyond those broken off": beyond} if beyond else {})

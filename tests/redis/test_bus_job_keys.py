"""What RQ leaves in Redis: nothing for ever, whatever became of a job, its worker and its site."""

from __future__ import annotations

from fnmatch import fnmatch
from pathlib import Path

import pytest

from headrace.bus import Bus, keys
from tests.redis.test_bus_jobs import GARBAGE, put_raw, store_job, work_off, worker
from tests.support.bus_values import SITE, make_site
from tests.support.waiting import wait_until

pytestmark = pytest.mark.redis


def names(bus: Bus, pattern: str = "*") -> set[str]:
    return {name.decode() for name in bus.redis.scan_iter(pattern)}


def for_ever_without_a_reason(bus: Bus) -> list[str]:
    """Every key, RQ's among them, that has neither a TTL nor a reason to live without one."""
    lasting = [name for name in names(bus) if bus.redis.ttl(name) == -1]
    return [name for name in lasting if not any(fnmatch(name, pattern) for pattern in keys.WITHOUT_TTL)]


def test_every_key_has_a_ttl_or_a_reason_at_each_step_of_a_job(bus: Bus, redis_url: str, tmp_path: Path) -> None:
    bus.sites.register(make_site(), ttl=60)
    for ordinal, sample in enumerate(("raise", "wait", "")):
        bus.jobs.queue_store(SITE, store_job(ordinal, sample=sample))
    assert for_ever_without_a_reason(bus) == []
    with worker(redis_url, tmp_path, "stay") as child:
        wait_until(lambda: len(child.handled()) == 2, 20, "the job that waits to begin")
        assert for_ever_without_a_reason(bus) == []
        child.process.kill()
        child.process.wait(10)
    assert for_ever_without_a_reason(bus) == []
    assert bus.redis.ttl(f"rq:workers:{keys.store_queue(SITE)}") > 0, "also the index of a worker that was killed"


def test_the_queue_of_an_evicted_site_goes_with_its_jobs(bus: Bus) -> None:
    bus.sites.register(make_site(), ttl=60)
    for ordinal in range(3):
        bus.jobs.queue_store(SITE, store_job(ordinal))
    bus.jobs.queue_store("siteb", store_job(7))
    bus.sites.unregister(SITE)
    assert bus.sites.evict(SITE)
    assert bus.jobs.depth(SITE) == 0
    assert bus.jobs.queued("siteb") == [store_job(7).request]
    assert [key.decode() for key in bus.redis.keys("rq:job:*")] == [f"rq:job:{store_job(7).request}-1"]


def test_nothing_of_an_evicted_sites_jobs_stays(bus: Bus, redis_url: str, tmp_path: Path) -> None:
    bus.sites.register(make_site(), ttl=60)
    put_raw(bus, "garbage", GARBAGE[1])
    bus.jobs.queue_store(SITE, store_job(0, sample="raise"))
    bus.jobs.queue_store(SITE, store_job(1, sample="wait"))
    bus.jobs.queue_store(SITE, store_job(2))
    with worker(redis_url, tmp_path, "stay") as child:
        wait_until(lambda: len(child.handled()) == 2, 20, "the job that waits to begin")
        child.process.kill()
        child.process.wait(10)
    bus.redis.lpush(f"rq:queue:{keys.store_queue(SITE)}:intermediate", "taken")
    bus.redis.hset("rq:job:taken", "status", "queued")
    assert len(names(bus, "rq:job:*")) == 5
    assert bus.jobs.failed(SITE) == 2
    bus.redis.delete(*names(bus, "rq:worker:*"))  # as their TTL does
    bus.sites.unregister(SITE)
    assert bus.sites.evict(SITE)
    left = {name for name in names(bus, "rq:*") if bus.redis.ttl(name) == -1}
    assert left == set()
    assert not names(bus, "rq:job:*")
    assert bus.jobs.workers(SITE) == 0
    bus.jobs.delete_queue("nosite")


def test_only_workers_that_live_are_counted(bus: Bus, redis_url: str, tmp_path: Path) -> None:
    with worker(redis_url, tmp_path, "stay") as child:
        wait_until(lambda: bus.jobs.workers(SITE) == 1, 20, "the worker")
        child.process.kill()
        child.process.wait(10)
    bus.redis.delete(*names(bus, "rq:worker:*"))  # as its TTL does
    assert bus.jobs.workers(SITE) == 0
    assert work_off(redis_url, tmp_path / "next") == []

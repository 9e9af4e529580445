"""The storage worker and what comes from outside: signals, and a server that goes away."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from headrace.bus import Bus
from tests.redis.test_bus_jobs import store_job, work_off, worker
from tests.support.bus_values import SITE
from tests.support.server import ValkeyServer
from tests.support.waiting import wait_until

pytestmark = pytest.mark.redis


def test_a_worker_ends_its_job_before_it_obeys_a_signal(bus: Bus, redis_url: str, tmp_path: Path) -> None:
    bus.jobs.queue_store(SITE, store_job(0, sample="wait"))
    bus.jobs.queue_store(SITE, store_job(1))
    with worker(redis_url, tmp_path, "stay") as child:
        wait_until(child.handled, 20, "the job to begin")
        assert bus.jobs.workers(SITE) == 1
        child.process.send_signal(signal.SIGTERM)
        (tmp_path / "go").touch()
        assert child.end() == {"end": "returned", "asked": True, "restored": True}
        assert len(child.handled()) == 1
    assert (bus.jobs.depth(SITE), bus.jobs.failed(SITE), bus.jobs.workers(SITE)) == (1, 0, 0)


def test_an_idle_worker_waits_for_a_server_that_comes_back(tmp_path: Path) -> None:
    with ValkeyServer(tmp_path / "redis", aof=True) as server:
        bus = Bus.open(server.url)
        with worker(server.url, tmp_path / "child", "stay") as child:
            wait_until(lambda: bus.jobs.workers(SITE), 20, "the worker")
            server.kill()
            server.start()
            bus.jobs.queue_store(SITE, store_job())
            wait_until(child.handled, 30, "the job to run after the restart")
            child.process.send_signal(signal.SIGTERM)
            assert child.end() == {"end": "returned", "asked": True, "restored": True}
        bus.close()


def test_a_worker_whose_server_goes_during_a_job_ends_the_job_and_gives_up(tmp_path: Path) -> None:
    with ValkeyServer(tmp_path / "redis", aof=True) as server:
        bus = Bus.open(server.url)
        bus.jobs.queue_store(SITE, store_job(0, sample="wait"))
        with worker(server.url, tmp_path / "child", "stay") as child:
            wait_until(child.handled, 20, "the job to begin")
            server.kill()
            (tmp_path / "child" / "go").touch()
            assert child.end() == {"end": "ConnectionError", "asked": False, "restored": True}
        server.start()
        assert bus.jobs.queued(SITE) == [], "only a lapsed storing lease brings it back, as job k + 1"
        assert not bus.jobs.queue_store(SITE, store_job(0))
        assert bus.jobs.queue_store(SITE, store_job(0, job=2))
        assert len(work_off(server.url, tmp_path / "next")) == 1
        bus.close()

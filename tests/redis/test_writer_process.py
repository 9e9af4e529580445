"""The writer as a process: signals at any moment, a Redis that refuses or goes away, and two writers at once."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import redis

from headrace.bus import Bus
from headrace.bus.jobs import FAILURE_TTL, HANDLE
from headrace.dumps import SITE_FILE
from headrace.messages import StoreJob, encode
from tests.redis.test_writer_handler import SITE, capture, view_of
from tests.support.server import ValkeyServer
from tests.support.stores import RUN, Sample, assert_stored, lines_of, make_sample, submit_to
from tests.support.waiting import wait_until

pytestmark = pytest.mark.redis

TOTAL = 40


class Writer:
    """`headrace-writer` as a process, its log in a file."""

    def __init__(self, dumps: Path, scratch: Path, redis_url: str, name: str = "writer") -> None:
        own = {key: value for key, value in os.environ.items() if not key.startswith("HEADRACE_")}
        own |= {
            "HEADRACE_DUMP_DIR": str(dumps),
            "HEADRACE_REDIS_URL": redis_url,
            "HEADRACE_QUARANTINE_DIR": str(scratch / "quarantine"),
        }
        self.log = scratch / f"{name}.log"
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-c", "from headrace_writer.main import run; run()"],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=own,
            )

    def wait_for(self, words: str) -> None:
        """Wait until the log says so."""
        wait_until(lambda: words in self.log.read_text(), 30, f"{words!r} in the writer's log")

    def stop(self) -> int:
        """SIGTERM; the exit code, which must come within seconds."""
        self.process.terminate()
        return self.process.wait(10)

    def __enter__(self) -> Writer:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(10)


@pytest.fixture
def dumps(tmp_path: Path) -> Path:
    """A dump folder that a watcher has taken."""
    folder = tmp_path / "dumps"
    folder.mkdir()
    (folder / SITE_FILE).write_text(f"{SITE.site}\n")
    return folder


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ValkeyServer]:
    """A server of the test's own, which it may harm."""
    with ValkeyServer(tmp_path / "redis", aof=True) as made:
        yield made


def begin(bus: Bus, output: Path) -> None:
    """A run whose samples are all fed."""
    bus.runs.create(submit_to(output, total=TOTAL))
    bus.runs.activate(RUN)
    bus.sites.register(SITE, 600)
    bus.runs.feed(RUN, 0, [""] * TOTAL)


def queue(bus: Bus, dumps: Path, sample: Sample) -> StoreJob:
    """Capture a sample and queue its job."""
    capture(bus, sample)
    sample.dump(dumps)
    job = sample.job()
    assert bus.jobs.queue_store(SITE.site, job)
    return job


def wait_stored(bus: Bus, count: int) -> None:
    wait_until(lambda: view_of(bus).stored == count, 60, f"{count} stored rows")


def test_a_signal_ends_the_writer_whenever_it_comes(bus: Bus, redis_url: str, dumps: Path, tmp_path: Path) -> None:
    # RQ's worker starts with several round trips before it has handlers of its own.
    for milliseconds in range(0, 22, 2):
        with Writer(dumps, tmp_path, redis_url, f"writer-{milliseconds}") as writer:
            writer.wait_for("storing")
            time.sleep(milliseconds / 1000)
            assert writer.stop() == 0, milliseconds
            assert "Traceback" not in writer.log.read_text()
    assert bus.jobs.workers(SITE.site) == 0


def test_a_signal_ends_a_writer_that_waits_for_redis_or_for_its_watcher(redis_url: str, tmp_path: Path) -> None:
    nobody, empty = "redis://127.0.0.1:9/0", tmp_path / "empty"
    empty.mkdir()
    for url, words in ((nobody, "waiting for Redis"), (redis_url, "waiting for the watcher")):
        with Writer(empty, tmp_path, url, words.replace(" ", "-")) as writer:
            writer.wait_for(words)
            assert writer.stop() == 0


def test_a_writer_leaves_a_folder_that_begins_another_life(redis_url: str, dumps: Path, tmp_path: Path) -> None:
    with Writer(dumps, tmp_path, redis_url) as writer:
        writer.wait_for("storing")
        (dumps / SITE_FILE).unlink()
        (dumps / SITE_FILE).symlink_to("nowhere")
        writer.wait_for("cannot be read")
        (dumps / SITE_FILE).unlink()
        (dumps / SITE_FILE).write_text("another\n")
        assert writer.process.wait(20) == 3
        assert "another site's folder" in writer.log.read_text()


def out_of_memory(client: redis.Redis) -> Callable[[], object]:
    client.config_set("maxmemory", "1")
    return lambda: client.config_set("maxmemory", "0")


def read_only(client: redis.Redis) -> Callable[[], object]:
    client.execute_command("REPLICAOF", "127.0.0.1", "9")
    return lambda: client.execute_command("REPLICAOF", "NO", "ONE")


@pytest.mark.parametrize("refuse", [out_of_memory, read_only])
def test_a_redis_that_takes_no_writes_is_waited_for(
    server: ValkeyServer, dumps: Path, tmp_path: Path, refuse: Callable[[redis.Redis], Callable[[], object]]
) -> None:
    output = tmp_path / "dataset"
    bus, client = Bus.open(server.url), server.client()
    begin(bus, output)
    samples = [make_sample(ordinal) for ordinal in range(2)]
    heal = refuse(client)
    with Writer(dumps, tmp_path, server.url) as writer:
        writer.wait_for("takes no writes")
        heal()
        queue(bus, dumps, samples[0])
        wait_stored(bus, 1)
        # And again, while the writer waits for a job; its connections are cut so that it need not wait long.
        seen = writer.log.read_text().count("takes no writes")
        heal = refuse(client)
        client.execute_command("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
        wait_until(lambda: writer.log.read_text().count("takes no writes") > seen, 60, "the writer to notice")
        heal()
        queue(bus, dumps, samples[1])
        wait_stored(bus, 2)
        assert writer.stop() == 0
    assert_stored(output, samples)
    bus.close()
    client.close()


def test_a_redis_that_restarts_is_waited_for(server: ValkeyServer, dumps: Path, tmp_path: Path) -> None:
    output = tmp_path / "dataset"
    bus = Bus.open(server.url)
    begin(bus, output)
    samples = [make_sample(ordinal) for ordinal in range(3)]
    with Writer(dumps, tmp_path, server.url) as writer:
        for stored, sample in enumerate(samples, 1):
            queue(bus, dumps, sample)
            wait_stored(bus, stored)
            server.kill()
            server.start()
        assert writer.stop() == 0
    assert_stored(output, samples)
    bus.close()


def test_two_writers_that_get_every_job_twice_store_each_row_once(
    bus: Bus, redis_url: str, dumps: Path, tmp_path: Path
) -> None:
    output = tmp_path / "dataset"
    begin(bus, output)
    samples = [make_sample(ordinal, tokens=400) for ordinal in range(TOTAL)]
    with ExitStack() as stack:
        writers = [stack.enter_context(Writer(dumps, tmp_path, redis_url, name)) for name in ("one", "two")]
        for writer in writers:
            writer.wait_for("storing")
        for sample in samples:
            job = queue(bus, dumps, sample)
            bus.jobs.rq_queue(SITE.site).enqueue_call(
                HANDLE, args=(encode(job),), job_id=f"{job.request}-again", result_ttl=0, failure_ttl=FAILURE_TTL
            )
        wait_stored(bus, TOTAL)
        wait_until(lambda: bus.jobs.depth(SITE.site) == 0, 60, "an empty queue")
        assert [writer.stop() for writer in writers] == [0, 0]
    assert_stored(output, samples)
    assert len({line.ordinal for line in lines_of(output)}) == TOTAL
    assert view_of(bus).tokens == 400 * TOTAL
    assert bus.jobs.failed(SITE.site) == 0
    assert not list(dumps.glob("hr-*"))
    assert not (output / ".quarantine").exists()

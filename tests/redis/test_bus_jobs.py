from __future__ import annotations

import json
import os
import subprocess
import sys
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import msgpack
import pytest

from headrace.bus import Bus, keys
from headrace.bus.jobs import HANDLE, Serializer
from headrace.ids import RequestId
from headrace.messages import Record, RecordJob, StoreJob, encode
from tests.support.bus_values import SITE

pytestmark = pytest.mark.redis

# A worker as the writer's process has one. Modes: burst; stay: until a signal; what the handler does is in the sample.
CHILD = """
import json, os, signal, sys, threading, time
from pathlib import Path
from dataclasses import asdict
from headrace.bus import Bus

url, folder, mode = sys.argv[1], Path(sys.argv[2]), sys.argv[3]

def handler(job):
    with (folder / "handled").open("a") as file:
        file.write(json.dumps(asdict(job)) + "\\n")
    sample = getattr(job, "sample", "")
    if sample == "raise":
        raise RuntimeError("the handler raised")
    if sample == "wait":
        while not (folder / "go").exists():
            time.sleep(0.01)

stop = threading.Event()
bus = Bus.open(url)
worker = bus.jobs.worker("sitea", f"w{os.getpid()}", handler, stop)
before = signal.getsignal(signal.SIGTERM)
(folder / "up").touch()
try:
    worker.work(burst=mode == "burst", logging_level="ERROR")
    end = "returned"
except Exception as error:
    end = type(error).__name__
restored = signal.getsignal(signal.SIGTERM) is before
(folder / "end").write_text(json.dumps({"end": end, "asked": stop.is_set(), "restored": restored}))
"""


class Worker:
    """The child, and what it did."""

    def __init__(self, process: subprocess.Popen[bytes], folder: Path) -> None:
        self.process = process
        self.folder = folder

    def handled(self) -> list[dict[str, Any]]:
        try:
            return [json.loads(line) for line in (self.folder / "handled").read_text().splitlines()]
        except FileNotFoundError:
            return []

    def end(self) -> dict[str, Any]:
        self.process.wait(30)
        found: dict[str, Any] = json.loads((self.folder / "end").read_text())
        return found


@contextmanager
def worker(url: str, folder: Path, mode: str) -> Iterator[Worker]:
    folder.mkdir(exist_ok=True)
    process = subprocess.Popen([sys.executable, "-c", CHILD, url, str(folder), mode])
    try:
        yield Worker(process, folder)
    finally:
        process.kill()
        process.wait(10)


def work_off(url: str, folder: Path) -> list[dict[str, Any]]:
    """Run a worker until the queue is empty; what its handler got."""
    with worker(url, folder, "burst") as child:
        assert child.end() == {"end": "returned", "asked": False, "restored": True}
        return child.handled()


def store_job(ordinal: int = 0, *, job: int = 1, sample: str = "") -> StoreJob:
    request = str(RequestId.make("run1", ordinal, "aaaaaaaa", [1, 2, 3]))
    return StoreJob(
        request=request, sample=sample or f"s{ordinal}", job=job, mask=(1, 2), engine="e", weight_version="w"
    )


RECORDS = RecordJob(
    run="run1",
    records=(Record(ordinal=3, sample="s3", status="failed", reason="timeout", request="", tokens=0),),
)


def put_raw(bus: Bus, job_id: str, data: bytes, **fields: str | bytes) -> None:
    """Put a job into the queue as anybody could who may write to Redis."""
    bus.redis.hset(
        f"rq:job:{job_id}",
        mapping={"data": data, "status": "queued", "origin": keys.store_queue(SITE), "timeout": "60", **fields},
    )
    bus.redis.sadd("rq:queues", f"rq:queue:{keys.store_queue(SITE)}")
    bus.redis.rpush(f"rq:queue:{keys.store_queue(SITE)}", job_id)


def payload(function: Any, *arguments: Any) -> bytes:
    return Serializer.dumps((function, None, arguments, {}))


def test_a_job_is_queued_once_and_comes_to_the_handler_as_it_was(bus: Bus, redis_url: str, tmp_path: Path) -> None:
    job, record = store_job(), RECORDS
    assert bus.jobs.queue_store(SITE, job)
    assert not bus.jobs.queue_store(SITE, job)
    assert bus.jobs.queue_store(SITE, store_job(job=2))
    assert bus.jobs.queue_record(SITE, record, "record-run1-1")
    assert not bus.jobs.queue_record(SITE, record, "record-run1-1")
    assert bus.jobs.depth(SITE) == 3
    assert bus.jobs.queued(SITE) == [job.request, job.request]
    one, two, three = work_off(redis_url, tmp_path)
    assert (one["request"], one["job"], one["mask"]) == (job.request, 1, [1, 2])
    assert two["job"] == 2
    assert three["records"][0]["reason"] == "timeout"
    assert (bus.jobs.depth(SITE), bus.jobs.failed(SITE), bus.jobs.queued(SITE)) == (0, 0, [])
    assert not bus.redis.keys("rq:job:*"), "a job that is done leaves nothing"
    assert bus.jobs.queue_store(SITE, job), "its id is free again"


def test_payloads_are_msgpack(bus: Bus) -> None:
    job = store_job()
    bus.jobs.queue_store(SITE, job)
    data = bus.redis.hget(f"rq:job:{job.request}-1", "data")
    assert data is not None
    function, instance, arguments, named = msgpack.unpackb(zlib.decompress(data))
    assert (function, instance, named) == (HANDLE, None, {})
    assert list(arguments) == [encode(job)]


def test_the_longest_request_id_makes_a_job_id(bus: Bus, redis_url: str, tmp_path: Path) -> None:
    request = RequestId(run="r" * 24, ordinal=10**12 - 1, nonce="z" * 8, tokens=999_999_999, digest="f" * 16)
    job = StoreJob(request=str(request), sample="s", job=1_000_000, mask=(999_999_999,), engine="e", weight_version="w")
    assert bus.jobs.queue_store(SITE, job)
    assert bus.jobs.queued(SITE) == [str(request)]
    assert [entry["request"] for entry in work_off(redis_url, tmp_path)] == [str(request)]


def test_a_job_that_raises_is_kept_as_failed_and_not_run_again(bus: Bus, redis_url: str, tmp_path: Path) -> None:
    bus.jobs.queue_store(SITE, store_job(0, sample="raise"))
    bus.jobs.queue_store(SITE, store_job(1))
    assert [entry["sample"] for entry in work_off(redis_url, tmp_path)] == ["raise", "s1"]
    assert (bus.jobs.depth(SITE), bus.jobs.failed(SITE)) == (0, 1)
    (name,) = bus.redis.keys("rq:job:*")
    assert 0 < bus.redis.ttl(name) <= 600
    assert not bus.jobs.queue_store(SITE, store_job(0)), "k names one job, also a failed one"
    assert bus.jobs.queue_store(SITE, store_job(0, job=2))


def test_a_job_that_names_another_function_is_failed_and_nothing_is_imported(
    bus: Bus, redis_url: str, tmp_path: Path
) -> None:
    trap = tmp_path / "trap"
    put_raw(bus, "evil-1", payload("os.mkdir", str(trap)))
    put_raw(bus, "evil-2", payload("subprocess.check_call", ["mkdir", str(trap)]))
    put_raw(bus, "evil-3", Serializer.dumps(("mkdir", "os", (str(trap),), {})))
    put_raw(bus, "evil-4", payload("", encode(store_job())))
    put_raw(bus, "evil-5", payload(["os.mkdir"], encode(store_job())))
    bus.jobs.queue_store(SITE, store_job(1))
    assert [entry["sample"] for entry in work_off(redis_url, tmp_path)] == ["s1"]
    assert bus.jobs.failed(SITE) == 5
    assert not trap.exists()


GARBAGE = [
    b"",
    b"\xc1\xc1",
    b"\x80\x04\x8c\x02os\x94\x8c\x06system\x94\x93\x94\x8c\x06id > x\x94\x85\x94R\x94.",  # a pickle
    msgpack.packb(17),
    msgpack.packb([1, 2]),
    payload(HANDLE),
    payload(HANDLE, encode(store_job()), b"more"),
    payload(HANDLE, "text"),
    payload(HANDLE, b"garbage"),
    payload(HANDLE, msgpack.packb({"schema": 2, "kind": "store"})),
    Serializer.dumps((HANDLE, None, (encode(store_job()),), {"name": 1})),
]


def test_jobs_that_carry_garbage_are_failed_and_the_next_one_runs(bus: Bus, redis_url: str, tmp_path: Path) -> None:
    for number, data in enumerate(GARBAGE):
        put_raw(bus, f"garbage-{number}", data)
    bus.jobs.queue_store(SITE, store_job(1))
    assert [entry["sample"] for entry in work_off(redis_url, tmp_path)] == ["s1"]
    assert bus.jobs.failed(SITE) == len(GARBAGE)


def test_callbacks_webhooks_and_retries_in_a_job_are_ignored(bus: Bus, redis_url: str, tmp_path: Path) -> None:
    calls: list[str] = []

    class Hook(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            calls.append(self.path)
            self.send_response(200)
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            pass

    module = tmp_path / "trapmodule.py"
    module.write_text(f"open({str(tmp_path / 'trap')!r}, 'w').close()\ndef call(*a, **k): pass\n")
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hook)
    Thread(target=server.serve_forever, daemon=True).start()
    hooks = [
        {"url": f"http://127.0.0.1:{server.server_address[1]}/{status}", "job_status": status}
        for status in ("finished", "failed")
    ]
    fields = {
        "success_callback_name": "trapmodule.call",
        "failure_callback_name": "trapmodule.call",
        "stopped_callback_name": "trapmodule.call",
        "webhooks": json.dumps(hooks),
        "retries_left": "3",
        "number_of_retries": "0",
        "repeats_left": "3",
        "repeat_intervals": "[0]",
    }
    put_raw(bus, "fine", payload(HANDLE, encode(store_job(1))), **fields)
    put_raw(bus, "wrong", payload(HANDLE, encode(store_job(2, sample="raise"))), **fields)
    environment = os.environ.get("PYTHONPATH", "")
    os.environ["PYTHONPATH"] = f"{tmp_path}{os.pathsep}{environment}"
    try:
        handled = work_off(redis_url, tmp_path / "child")
    finally:
        os.environ["PYTHONPATH"] = environment
        server.shutdown()
        server.server_close()
    assert [entry["sample"] for entry in handled] == ["s1", "raise"]
    assert not (tmp_path / "trap").exists()
    assert calls == []
    assert (bus.jobs.depth(SITE), bus.jobs.failed(SITE)) == (0, 1)


def test_workers_take_only_the_jobs_of_their_site(bus: Bus, redis_url: str, tmp_path: Path) -> None:
    bus.jobs.queue_store("siteb", store_job(7))
    assert work_off(redis_url, tmp_path) == []
    assert bus.jobs.depth("siteb") == 1

"""Measures what one request's whole life costs on the bus: feed, claim, answered, capture, begin_store, stored.

Usage: python bench/bus.py [--redis-url URL] [--requests N] [--batch N]

Without a URL it starts a server of its own (which may then be emptied; a server that is given is not). Prints
microseconds per request for each step: on the wall, CPU of this process, CPU of the server.
"""

from __future__ import annotations

import argparse
import contextlib
import secrets
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence

from headrace.bus import Bus
from headrace.bus.values import Attempt, Site
from headrace.errors import Unavailable
from headrace.ids import RequestId
from headrace.runs import Identity, RunSpec
from headrace_cli.valkey import server_binary

BOUNDARIES, HIDDEN, TOKENS = (2, 16, 29), 2048, 300
IDENTITY = Identity(engine="bench", weight_version="bench")
SITE = "bench"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--redis-url", default="")
    parser.add_argument("--requests", type=int, default=5000)
    parser.add_argument("--batch", type=int, default=50, help="attempts in a claim")
    options = parser.parse_args()
    with _server(options.redis_url) as url:
        bus = Bus.open(url)
        print(f"redis {bus.server_facts().version}, {options.requests} requests, claims of {options.batch}")
        print(f"{'step':12} {'wall':>8} {'client':>8} {'server':>8}   us per request")
        _measure(bus, options.requests, options.batch)
        bus.close()


@contextlib.contextmanager
def _server(url: str) -> Iterator[str]:
    if url:
        yield url
        return
    with socket.socket() as listener, tempfile.TemporaryDirectory() as folder:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
        listener.close()
        command = [str(server_binary()), "--port", str(port), "--bind", "127.0.0.1", "--dir", folder]
        command += ["--appendonly", "yes", "--appendfsync", "everysec", "--save", ""]
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        try:
            yield _answering(f"redis://127.0.0.1:{port}/0")
        finally:
            process.terminate()
            process.wait(10)


def _answering(url: str) -> str:
    for _ in range(20):
        with contextlib.suppress(Unavailable):
            Bus.open(url).close()
            return url
    raise Unavailable(f"no Redis at {url}")


def _measure(bus: Bus, count: int, batch: int) -> None:
    run = "bench" + secrets.token_hex(4)
    bus.runs.create(_spec(run, count))
    bus.runs.activate(run)
    bus.sites.register(_site(), ttl=3600)
    attempts = [_attempt(run, ordinal) for ordinal in range(count)]
    requests = [RequestId.parse(attempt.request) for attempt in attempts]
    nbytes = attempts[0].dump_bytes

    def in_batches(call: Callable[[int, int], object], size: int) -> None:
        for start in range(0, count, size):
            call(start, min(start + size, count))

    def each(call: Callable[[RequestId], object]) -> None:
        for request in requests:
            call(request)

    steps: Sequence[tuple[str, Callable[[], None]]] = [
        ("feed", lambda: in_batches(lambda a, b: bus.runs.feed(run, a, [""] * (b - a)), 200)),
        ("claim", lambda: in_batches(lambda a, b: bus.requests.claim(run, SITE, "boot", attempts[a:b]), batch)),
        ("answered", lambda: each(lambda request: bus.requests.answered(run, str(request)))),
        ("capture", lambda: each(lambda request: bus.requests.capture(request, SITE, nbytes, IDENTITY))),
        ("begin_store", lambda: each(lambda request: bus.requests.begin_store(request, 1, SITE))),
        ("stored", lambda: each(lambda request: bus.requests.stored(request, SITE, nbytes))),
    ]
    totals = [0.0, 0.0, 0.0]
    for name, step in steps:
        before = _clocks(bus)
        step()
        spent = [(after - start) / count * 1e6 for after, start in zip(_clocks(bus), before, strict=True)]
        totals = [total + part for total, part in zip(totals, spent, strict=True)]
        _line(name, spent)
    _line("life", totals)
    view = bus.runs.get(run)
    if view is None or view.state != "finished" or view.stored != count:
        raise SystemExit(f"not every request came to its end: {view}")
    bus.sites.unregister(SITE)
    bus.sites.evict(SITE)


def _line(name: str, figures: Sequence[float]) -> None:
    print(f"{name:12} " + " ".join(f"{figure:8.1f}" for figure in figures))


def _clocks(bus: Bus) -> tuple[float, float, float]:
    cpu = bus.redis.info("cpu")
    return time.perf_counter(), time.process_time(), cpu["used_cpu_user"] + cpu["used_cpu_sys"]


def _spec(run: str, total: int) -> RunSpec:
    return RunSpec(
        run=run,
        dataset="bench",
        total=total,
        model="bench",
        model_digest="cccccccccccccccc",
        engine_model="bench",
        boundaries=BOUNDARIES,
        final_state="pre_norm",
        hidden_size=HIDDEN,
        format="headrace",
        output="/nowhere",
        max_attempts=3,
    )


def _site() -> Site:
    return Site(
        site=SITE,
        url="http://127.0.0.1:1",
        boot="boot",
        incarnation="bench",
        model="bench",
        boundaries=BOUNDARIES,
        final_state="pre_norm",
        hidden_size=HIDDEN,
        dtype="BF16",
        fingerprint=IDENTITY.engine,
        weight_version=IDENTITY.weight_version,
        final_norm=True,
        context_length=1 << 20,
        max_requests=1 << 40,
        max_tokens=1 << 40,
        dump_cap_bytes=1 << 60,
        dump_bytes=0,
    )


def _attempt(run: str, ordinal: int) -> Attempt:
    return Attempt(
        ordinal=ordinal,
        request=str(RequestId.make(run, ordinal, secrets.token_hex(4), range(TOKENS))),
        tokens=TOKENS,
        dump_bytes=TOKENS * ((len(BOUNDARIES) + 1) * HIDDEN * 2 + 8),
        sample=f"sample-{ordinal}",
        mask=(20, 100, 20, 160),
    )


if __name__ == "__main__":
    main()

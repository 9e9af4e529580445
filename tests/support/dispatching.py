"""A dispatcher at work: its inputs, an engine's HTTP side without capture, and the process itself."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from headrace.bus import Bus
from headrace.bus.values import RunView, Site
from headrace.manifest import MANIFEST_FOLDER
from headrace.runs import RunSpec
from headrace.service import Health, Service
from headrace.settings import Settings
from headrace_dispatcher.daemon import Dispatcher
from headrace_dispatcher.inputs import RejectedSample
from headrace_dispatcher.inputs import Sample as InputSample
from headrace_dispatcher.inputs_writer import InputsWriter
from headrace_dispatcher.rebuild import rebuild
from tests.support.bus_values import make_line
from tests.support.http import StubServer
from tests.support.stores import RUN, Sample, make_sample, make_spec
from tests.support.waiting import wait_until
from tests.support.watched import make_site


def write_inputs(output: Path, samples: list[Sample], rejected: int = 0, **changes: Any) -> RunSpec:
    """Write the inputs of a run of these samples, and after them as many rejected ones."""
    spec = make_spec(output, total=len(samples) + rejected, **changes)
    with InputsWriter(output) as writer:
        for sample in samples:
            writer.add(InputSample(ordinal=sample.ordinal, sample=sample.name, ids=sample.token_ids, mask=sample.mask))
        for ordinal in range(len(samples), spec.total):
            writer.add(RejectedSample(ordinal=ordinal, sample="bad", reason="too_long", detail="9000 tokens"))
        writer.publish(spec)
    return spec


def submit(bus: Bus, output: Path, lengths: list[int], **changes: Any) -> RunSpec:
    """A run of samples of these lengths, ready to be served."""
    samples = [make_sample(ordinal, tokens) for ordinal, tokens in enumerate(lengths)]
    spec = write_inputs(output, samples, **changes)
    rebuild(bus, spec)
    return spec


def write_lines(output: Path, ordinals: list[int], segment: str = "a.jsonl") -> None:
    """Append lines of stored samples to a segment of the manifest."""
    path = output / MANIFEST_FOLDER / segment
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab") as file:
        file.writelines(make_line(ordinal).encode() for ordinal in ordinals)


def view_of(bus: Bus, run: str = RUN) -> RunView:
    """The run, which Redis must know."""
    view = bus.runs.get(run)
    assert view is not None
    return view


class Engine(StubServer):
    """Answers `/generate` with what `reply` returns, a status and a body, and remembers what it was asked.

    `health` is called for each probe and returns its status.
    """

    def __init__(self, reply: Callable[[dict[str, Any]], tuple[int, bytes]] | None = None) -> None:
        self.reply = reply or (lambda body: (200, b'{"text": "", "meta_info": {}}'))
        self.asked: list[dict[str, Any]] = []
        self.health: Callable[[], int] = lambda: 200
        self.probed = 0
        super().__init__()

    def site(self, name: str = "s1", **changes: Any) -> Site:
        """Its registration."""
        return make_site(name, url=self.url, **changes)

    def ordinals(self) -> list[int]:
        """Which samples were sent here, sorted."""
        return sorted(int(body["rid"].split("-")[2]) for body in self.asked)

    def answer(self, method: str, path: str, body: bytes) -> tuple[int, bytes]:
        """Answer `/generate` with the reply, a probe with the health, all else with nothing."""
        if path == "/health_generate":
            self.probed += 1
            return self.health(), b""
        if path != "/generate":
            return 200, b""
        asked = json.loads(body)
        self.asked.append(asked)
        return self.reply(asked)


@contextmanager
def hanging_listener() -> Iterator[str]:
    """The URL of something that accepts connections and never answers."""
    with socket.create_server(("127.0.0.1", 0), backlog=128) as listener:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"


@contextmanager
def dispatching(bus: Bus, **settings: Any) -> Iterator[Service]:
    """A dispatcher in a thread of this process; what ended it is raised at the end."""
    quick = {"reap_seconds": 0.05, "site_ttl_seconds": 3600, "drain_seconds": 0}
    service = Service("dispatcher", Settings(**{**quick, **settings}), Health("redis"))
    crashes: list[BaseException] = []

    def run() -> None:
        try:
            Dispatcher(service, Bus.open(bus.where, leases=bus.requests.leases)).run()
        except BaseException as error:  # noqa: BLE001 - raised below
            crashes.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield service
    finally:
        service.stop.set()
        thread.join(30)
        assert not thread.is_alive()
    if crashes:
        raise crashes[0]


class DispatcherProcess:
    """`headrace-dispatcher` as a process, its log in a file."""

    def __init__(self, scratch: Path, redis_url: str, **settings: object) -> None:
        """`settings` are HEADRACE_* variables in lower case."""
        own = {name: value for name, value in os.environ.items() if not name.startswith("HEADRACE_")}
        given = {f"HEADRACE_{name.upper()}": str(value) for name, value in settings.items()}
        self.log = scratch / "dispatcher.log"
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-c", "from headrace_dispatcher.main import run; run()"],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**own, "HEADRACE_REDIS_URL": redis_url, **given},
            )

    def text(self) -> str:
        """The log until now."""
        return self.log.read_text()

    def wait_for(self, words: str, timeout: float = 30) -> None:
        """Wait until the log says so."""
        wait_until(lambda: words in self.text(), timeout, f"{words!r} in the dispatcher's log")

    def __enter__(self) -> DispatcherProcess:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(10)

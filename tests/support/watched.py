"""What a watcher needs around it: an engine's HTTP side and its dumps, a run in Redis, and the process itself."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from headrace.bus import Bus
from headrace.bus.values import Site
from headrace.dumps import ENGINE_FILE, LOST_SUFFIX, PRE_NORM, EngineCard, Lost, encode_json
from headrace.finalnorm import FinalNorm, norm_file, with_norm
from headrace.ids import RequestId
from tests.support.dumps import BARE_ENGINE, ENGINE, MODEL, WEIGHTS, make_dump
from tests.support.http import StubServer, get
from tests.support.stores import BOUNDARIES, HIDDEN, RUN, Sample, make_spec
from tests.support.waiting import wait_until

BOOT = "bootbootboot"


def make_card(**changes: Any) -> EngineCard:
    """The card of an engine whose dumps `make_dump` writes; `changes` replaces fields."""
    card = EngineCard(
        boot=BOOT,
        model=MODEL,
        fingerprint=ENGINE,
        weight_version=WEIGHTS,
        boundaries=BOUNDARIES,
        final_state=PRE_NORM,
        layers=8,
        hidden_size=HIDDEN,
        dtype="BF16",
        norm_file="",
    )
    return replace(card, **changes)


def make_site(name: str, **changes: Any) -> Site:
    """The registration of such an engine."""
    site = Site(
        site=name,
        url="http://127.0.0.1:9",
        boot=BOOT,
        incarnation="1",
        model=MODEL,
        boundaries=BOUNDARIES,
        final_state=PRE_NORM,
        hidden_size=HIDDEN,
        dtype="BF16",
        fingerprint=ENGINE,
        weight_version=WEIGHTS,
        final_norm=True,
        context_length=4096,
        max_requests=64,
        max_tokens=1 << 20,
        dump_cap_bytes=1 << 30,
        dump_bytes=0,
    )
    return replace(site, **changes)


def put(path: Path, data: bytes) -> None:
    """Publish a file whole, replacing."""
    with tempfile.NamedTemporaryFile(dir=path.parent, prefix=".new-", delete=False) as file:
        file.write(data)
    Path(file.name).rename(path)


def publish(folder: Path, request: RequestId, token_ids: Sequence[int], /, **changes: Any) -> Path:
    """Publish a dump as the plugin does, whole and by a link; `changes` replaces fields of its header."""
    with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
        made = make_dump(Path(scratch), request, token_ids, BOUNDARIES, HIDDEN, changes=changes)
        path = folder / made.name
        path.hardlink_to(made)
    return path


def lose(folder: Path, request: RequestId, reason: str, detail: str = "for a test") -> Path:
    """Leave a lost notice as the plugin does."""
    path = folder / f"{request}{LOST_SUFFIX}"
    put(path, encode_json(Lost(request=str(request), reason=reason, detail=detail, boot=BOOT)))
    return path


def claim(bus: Bus, site: str, samples: Sequence[Sample], attempt: int = 0) -> None:
    """Record an attempt at each sample, as a dispatcher does before it posts."""
    attempts = [sample.opened(attempt) for sample in samples]
    assert bus.requests.claim(RUN, site, BOOT, attempts) == ["claimed"] * len(samples)


def declare(folder: Path, norm: FinalNorm | None, **changes: Any) -> None:
    """Publish an engine's card, and its final norm if it has one, as the capture core does at each boot."""
    card = make_card(**{"fingerprint": with_norm(BARE_ENGINE, norm), **changes})
    if norm is not None:
        card = replace(card, norm_file=norm_file(card.boot))
        put(folder / card.norm_file, norm.encode())
    put(folder / ENGINE_FILE, encode_json(card))


class StubEngine(StubServer):
    """An engine's HTTP side; what it does with a canary is up to `on_canary`, which publishes into `folder`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.health = 200
        self.info: Mapping[str, Any] = {"max_req_input_len": 1000}
        self.canaries: list[RequestId] = []
        self.status = 200
        self.reply = b'{"text": "", "meta_info": {}}'
        self.on_canary: Callable[[RequestId, list[int]], object] = self.capture
        super().__init__()

    def boot(self, **changes: Any) -> None:
        """Publish the card, as the plugin does once a boot."""
        put(self.folder / ENGINE_FILE, encode_json(make_card(**changes)))

    def capture(self, request: RequestId, token_ids: list[int]) -> Path:
        """Publish the states of a canary."""
        return publish(self.folder, request, token_ids)

    def answer(self, method: str, path: str, body: bytes) -> tuple[int, bytes]:
        """Answer as SGLang does, for what a watcher asks."""
        match method, path:
            case "GET", "/health":
                return self.health, b""
            case "GET", "/get_server_info":
                return 200, json.dumps(self.info).encode()
            case "POST", "/generate":
                return self._generate(json.loads(body))
        return 404, b"not found"

    def _generate(self, body: dict[str, Any]) -> tuple[int, bytes]:
        request = RequestId.parse(body["rid"])
        assert body["extra_key"] == body["rid"]
        assert body["sampling_params"]["max_new_tokens"] == 0
        self.canaries.append(request)
        if self.status == 200:
            self.on_canary(request, body["input_ids"])
        return self.status, self.reply


class WatcherProcess:
    """`headrace-watcher` as a process, its log in a file."""

    def __init__(self, folder: Path, scratch: Path, redis_url: str, engine_url: str, **settings: object) -> None:
        """`settings` are HEADRACE_* variables in lower case, over ones that make it quick."""
        quick = {
            "dump_dir": folder,
            "redis_url": redis_url,
            "engine_url": engine_url,
            "quarantine_dir": scratch / "quarantine",
            "heartbeat_seconds": 0.1,
            "rescan_seconds": 0.1,
            "site_ttl_seconds": 30,
            "canary_timeout_seconds": 20,
            "orphan_grace_seconds": 20,
        }
        own = {name: value for name, value in os.environ.items() if not name.startswith("HEADRACE_")}
        given = {f"HEADRACE_{name.upper()}": str(value) for name, value in {**quick, **settings}.items()}
        self.log = scratch / "watcher.log"
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-c", "from headrace_watcher.main import run; run()"],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**own, **given},
            )

    def text(self) -> str:
        """The log until now."""
        return self.log.read_text()

    def wait_for(self, words: str, timeout: float = 20) -> None:
        """Wait until the log says so."""
        wait_until(lambda: words in self.text(), timeout, f"{words!r} in the watcher's log")

    def stop(self) -> int:
        """SIGTERM; returns the exit code."""
        self.process.terminate()
        return self.process.wait(10)

    def __enter__(self) -> WatcherProcess:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait(10)


def registered(bus: Bus) -> Site:
    """Wait for a registration."""
    return wait_until(lambda: (bus.sites.registered() or [None])[0], what="a registration")


def start_run(bus: Bus, out: Path, total: int = 8) -> None:
    """A run whose samples are all pending."""
    bus.runs.create(make_spec(out, total=total))
    bus.runs.activate(RUN)
    bus.runs.feed(RUN, 0, [""] * total)


def ready(port: int) -> tuple[int, str]:
    """What /readyz says."""
    return get(port, "/readyz")

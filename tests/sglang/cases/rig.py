"""One server with what a case needs around it: a client, its dump folder, and what the provoking plugin noted."""

from __future__ import annotations

import json
import shutil
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import requests

from headrace.capturestats import CaptureStats, read_stats, stats_file
from headrace.dumps import DumpHeader, Lost
from tests.sglang.cases import provoking
from tests.sglang.cases.asking import Client, Prompt, Prompts
from tests.sglang.cases.checking import Folder, Reference
from tests.sglang.server import ServerConfig, SglangServer
from tests.support.waiting import wait_until

VOCAB = 400
CHUNK = 64
POOL = 4096
CONTEXT = 2048
RUNNING = 32  # requests that generate at a time
MAIN = ServerConfig(
    model="llama",
    chunk_tokens=CHUNK,
    mixed_chunk=True,
    pool_tokens=POOL,
    # Without a priority a request has the lowest, and among equals the first one goes first, as without the flag.
    flags=("--context-length", str(CONTEXT), "--enable-priority-scheduling", "--max-running-requests", str(RUNNING)),
)

_METADATA = "Metadata-Version: 2.1\nName: provoking\nVersion: 0\n"
_ENTRY_POINTS = "[sglang.srt.plugins]\nprovoking = provoking:register\n"


def install_provoking(folder: Path) -> Path:
    """Make a folder one in which SGLang finds the provoking plugin; returns it."""
    folder.mkdir(parents=True, exist_ok=True)
    shutil.copy(provoking.__file__, folder)
    information = folder / "provoking-0.dist-info"
    information.mkdir()
    (information / "METADATA").write_text(_METADATA)
    (information / "entry_points.txt").write_text(_ENTRY_POINTS)
    return folder


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """One request's rows in one forward, of which `others` were part too; `mode` is SGLang's name of the forward's."""

    mode: str
    prefix: int
    rows: int
    others: tuple[str, ...]


class Rig:
    """A running server, a client of it, and its dump folder."""

    def __init__(self, server: SglangServer, reference: Reference, seed: str) -> None:
        self.server = server
        self.client = Client(server.url)
        self.folder = Folder(server.dump_dir, reference)
        self.prompts = Prompts(VOCAB, seed)
        self._provoking = server.dump_dir.with_name(provoking.NAME)
        self._offset = self._forwards.stat().st_size if self._forwards.exists() else 0

    @property
    def _forwards(self) -> Path:
        return self._provoking / provoking.FORWARDS

    def all_pieces(self) -> Iterator[tuple[str, Piece]]:
        """What the model computed since the test began, each with its request."""
        if not self._forwards.exists():
            return
        with self._forwards.open() as file:
            file.seek(self._offset)
            for line in map(json.loads, file):
                for place, rid in enumerate(line["rids"]):
                    yield (
                        rid,
                        Piece(
                            mode=line["mode"],
                            prefix=line["prefixes"][place] if line["prefixes"] else -1,
                            rows=line["rows"][place] if line["rows"] else 1,
                            others=tuple(other for other in line["rids"] if other != rid),
                        ),
                    )

    def pieces(self, rid: str) -> list[Piece]:
        """What it computed of one request."""
        return [piece for found, piece in self.all_pieces() if found == rid]

    def waiting(self) -> int:
        """How many requests wait in the scheduler's queue."""
        loads = self.client.get("/v1/loads").json()["loads"]
        return sum(int(load["num_waiting_reqs"]) for load in loads)

    def stats(self) -> CaptureStats:
        """The engine's statistics, as it last wrote them."""
        return read_stats(self.folder.path / stats_file(self.folder.card.boot))

    def counts(self) -> Counter[str]:
        """What the engine counts, as it last wrote: `published`, and `lost: {reason}`."""
        try:
            stats = self.stats()
        except FileNotFoundError:
            return Counter()
        return Counter({"published": stats.published, **{f"lost: {key}": lost for key, lost in stats.lost.items()}})

    def settled_counts(self) -> Counter[str]:
        """What it counts when it is idle: it writes within a second of a change, so what stays for two is the last."""
        last, since = self.counts(), time.monotonic()
        while time.monotonic() - since < 2.0:
            time.sleep(0.1)
            if (now := self.counts()) != last:
                last, since = now, time.monotonic()
        return last

    def wait_pieces(self, rid: str, count: int) -> None:
        """Wait until so many pieces of a request were computed."""
        wait_until(lambda: len(self.pieces(rid)) >= count, 30.0, f"{count} pieces of {rid}")

    @contextmanager
    def provoked(self, what: str, content: str = "") -> Iterator[None]:
        """The provoking plugin does something, for as long as the block lasts."""
        path = self._provoking / what
        unfinished = path.with_suffix(".new")
        unfinished.write_text(content)
        unfinished.rename(path)
        try:
            yield
        finally:
            path.unlink()

    def take(self, prompt: Prompt) -> DumpHeader:
        """The prompt's dump: waited for, checked and removed."""
        return self.folder.take(prompt.rid, prompt.ids)

    def take_all(self, prompts: Sequence[Prompt], answers: Sequence[Future[requests.Response]]) -> list[DumpHeader]:
        """Each was answered, and has its dump."""
        for answer in answers:
            assert answer.result().status_code == 200, answer.result().text
        return [self.take(prompt) for prompt in prompts]

    def take_lost(self, prompt: Prompt) -> Lost:
        """The prompt's notice: waited for and removed."""
        return self.folder.take_lost(prompt.rid)

    def capture(self, prompt: Prompt, new_tokens: int = 0) -> DumpHeader:
        """Send a prompt that nothing happens to, and take its dump."""
        assert self.client.capture(prompt, new_tokens).status_code == 200
        return self.take(prompt)

    def assert_nothing_left(self) -> None:
        """When the server is idle, its folder holds nothing of a request; a last one, captured whole, shows that."""
        wait_until(lambda: self.client.post("/flush_cache").status_code == 200, 60.0, "an idle server")
        self.capture(self.prompts.new(CHUNK + 1))
        assert self.folder.left() == []

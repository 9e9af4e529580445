"""The real SGLang as a process of its own group, on a CPU, with headrace installed beside it."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

import requests

from headrace.dumpfolder import read_card
from headrace.dumps import ENGINE_FILE, EngineCard
from headrace_cli.stack import Stack, StackConfig, die_with_parent
from tests.sglang.env import NEWEST, OLDEST, Environment
from tests.support.server import free_port
from tests.support.waiting import wait_until

READY_SECONDS = 400.0  # 60 to 90 s on two quiet cores
STOP_SECONDS = 20.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """What a server is started with; equal ones are the same server to the tests of a session.

    `model` is a name of `tests.sglang.models.MODELS`. `native` turns SGLang's own auxiliary output on (0.5.23), without
    it the plugin stands on the logits processor. `chunk_tokens` is the size of a prefill's chunk. `boundaries` and
    `final_state` are the plugin's settings, empty for its defaults. `flags` and `environ` come last and win.
    """

    model: str = "smollm2"
    version: str = NEWEST
    tp: int = 1
    dtype: str = "float32"
    chunk_tokens: int = 256
    mixed_chunk: bool = False
    radix: bool = True
    native: bool = True
    boundaries: str = ""
    final_state: str = ""
    pool_tokens: int = 16_384
    flags: tuple[str, ...] = ()
    environ: tuple[tuple[str, str], ...] = ()

    def arguments(self, model: Path, port: int) -> list[str]:
        """The flags of `sglang.launch_server`."""
        flags = ["--model-path", str(model), "--host", "127.0.0.1", "--port", str(port), "--device", "cpu"]
        flags += ["--dtype", self.dtype, "--tp-size", str(self.tp), "--attention-backend", "torch_native"]
        flags += ["--disable-cuda-graph", "--mem-fraction-static", "0.1", "--sleep-on-idle"]
        flags += ["--max-total-tokens", str(self.pool_tokens), "--chunked-prefill-size", str(self.chunk_tokens)]
        if self.native:
            flags += ["--enable-return-aux-hidden-states", "--speculative-algorithm", "EAGLE3"]
        if self.mixed_chunk:
            flags.append("--enable-mixed-chunk")
        if not self.radix:
            flags.append("--disable-radix-cache")
        return [*flags, *self.flags]

    def variables(self) -> dict[str, str]:
        """The variables that go with them."""
        table = {
            "HEADRACE_CAPTURE_BOUNDARIES": self.boundaries,
            "HEADRACE_CAPTURE_FINAL_STATE": self.final_state,
            # A rank a core; without it a rank binds itself to sockets that a small machine lacks.
            "SGLANG_CPU_OMP_THREADS_BIND": "|".join(map(str, range(self.tp))) if self.tp > 1 else "",
        }
        return {name: value for name, value in table.items() if value} | dict(self.environ)


SMOL = ServerConfig()
LLAMA_LOGITS = ServerConfig(model="llama", native=False, chunk_tokens=128, mixed_chunk=True)
QWEN3_TP2 = ServerConfig(model="qwen3", tp=2, dtype="bfloat16", chunk_tokens=128)
LLAMA_OLDEST = ServerConfig(model="llama", version=OLDEST, native=False, chunk_tokens=128)


class SglangServer:
    """One server: started by `start` or the block, ended with all its processes by `stop` or the block's end."""

    def __init__(self, config: ServerConfig, environment: Environment, model: Path, logs: Path) -> None:
        """`environment` has headrace beside SGLang, `model` is the checkpoint, `logs` a folder for the output."""
        self.config = config
        self.model = model
        self._environment = environment
        self._place = Path(tempfile.mkdtemp(prefix="headrace-", dir=_tmpfs()))
        self.dump_dir = self._place / "dumps"
        logs.mkdir(parents=True, exist_ok=True)
        self.log = logs / f"{self._place.name}.log"
        self._process: subprocess.Popen[bytes] | None = None
        self._port = 0

    @property
    def url(self) -> str:
        """Where it listens."""
        return f"http://127.0.0.1:{self._port}"

    @property
    def pid(self) -> int:
        """The process id of the HTTP server, which leads the group of all its processes."""
        assert self._process is not None, "the server is not running"
        return self._process.pid

    @property
    def alive(self) -> bool:
        """Whether the HTTP server's process runs."""
        return self._process is not None and self._process.poll() is None

    def start(self) -> SglangServer:
        """Start it and wait until `/health` says that it serves; its dump folder keeps what it had."""
        assert self._process is None, "the server runs already"
        self._port = free_port()
        launch = self._environment.paths[-1] / "launch.py"
        command = [str(self._environment.python), str(launch), *self.config.arguments(self.model, self._port)]
        variables = {"HEADRACE_DUMP_DIR": str(self.dump_dir), **self.config.variables()}
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                command,
                env=self._environment.environ(**variables),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=partial(die_with_parent, signal.SIGTERM),  # it ends its own children then
            )
        wait_until(self._healthy, READY_SECONDS, f"the server's health; its log is {self.log}")
        return self

    def stop(self) -> None:
        """SIGTERM to the group, then SIGKILL: none of its processes is left."""
        process, self._process = self._process, None
        if process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(STOP_SECONDS)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()

    def close(self) -> None:
        """Stop it, and remove its dump folder."""
        self.stop()
        shutil.rmtree(self._place, ignore_errors=True)

    def __enter__(self) -> SglangServer:
        try:
            return self.start()
        except BaseException:
            self.close()
            raise

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def card(self) -> EngineCard:
        """What the plugin declares; FileNotFoundError where it captures nothing."""
        return read_card(self.dump_dir / ENGINE_FILE)

    def stack(self, folder: Path) -> Stack:
        """Every service but the engine, in front of this server; leases and limits are the defaults."""
        return Stack(
            StackConfig(folder=folder, model=self.model, model_name="", dump_dir=self.dump_dir, engine_url=self.url)
        )

    def get(self, path: str, timeout: float = 30.0) -> requests.Response:
        return requests.get(self.url + path, timeout=timeout)

    def post(self, path: str, body: Any = None, timeout: float = 120.0) -> requests.Response:
        return requests.post(self.url + path, json=body, timeout=timeout)

    def generate(
        self, ids: Sequence[int], rid: str | None = None, max_new_tokens: int = 0, timeout: float = 120.0, **more: Any
    ) -> requests.Response:
        """POST one prompt, as the dispatcher does: a request with an id has it as its `extra_key`, too.

        `more` are further keys of the body, which win.
        """
        sampling = {"max_new_tokens": max_new_tokens, "temperature": 0}
        named = {} if rid is None else {"rid": rid, "extra_key": rid}
        return self.post("/generate", {"input_ids": list(ids), "sampling_params": sampling, **named, **more}, timeout)

    def settle(self) -> None:
        """Wait until nothing runs or waits; let a paused scheduler go on, empty its cache, and remove dumps and notices
        of requests, so that the next test finds what a fresh server has."""
        self.post("/continue_generation", {}).raise_for_status()
        self.post("/abort_request", {"abort_all": True}).raise_for_status()
        wait_until(lambda: self.post("/flush_cache").status_code == 200, 60.0, "an idle server")
        for path in self.dump_dir.glob("hr-*"):
            path.unlink(missing_ok=True)

    def _healthy(self) -> bool:
        assert self.alive, f"the server ended: {self.log.read_text(errors='replace')[-4000:]}"
        with contextlib.suppress(requests.RequestException):
            return self.get("/health").status_code == 200
        return False


@dataclass(slots=True, kw_only=True)
class Servers:
    """The session's servers, of which one lives at a time: asking for another ends it."""

    environment: Callable[[str], Environment]
    checkpoint: Callable[[str], Path]
    logs: Path
    _running: SglangServer | None = field(default=None, init=False)

    def get(self, config: ServerConfig) -> SglangServer:
        """The server of this configuration, running and settled; a fresh one where it ended or never was."""
        running = self._running
        if running is None or running.config != config or not running.alive:
            self.close()
            model, environment = self.checkpoint(config.model), self.environment(config.version)
            self._running = running = SglangServer(config, environment, model, self.logs)
            running.start()
        else:
            running.settle()
        return running

    def close(self) -> None:
        """End the one that lives."""
        running, self._running = self._running, None
        if running is not None:
            running.close()

    @contextlib.contextmanager
    def alone(self, config: ServerConfig, **environ: str) -> Iterator[SglangServer]:
        """A server for one test, which may harm it; `environ` are further variables."""
        self.close()
        changed = replace(config, environ=tuple((dict(config.environ) | environ).items()))
        model, environment = self.checkpoint(config.model), self.environment(config.version)
        with SglangServer(changed, environment, model, self.logs) as server:
            yield server


def _tmpfs() -> str | None:
    return "/dev/shm" if os.access("/dev/shm", os.W_OK) else None

"""The embedded engine as a real process, over HTTP."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import requests

from tests.support.waiting import wait_until

SCRIPT = Path(sys.executable).with_name("headrace-engine")
READY_SECONDS = 90.0


def engine_environ(**variables: str) -> dict[str, str]:
    """The environment of an engine: this process's, without settings of the caller."""
    return {name: value for name, value in os.environ.items() if not name.startswith("HEADRACE_")} | variables


class EngineProcess:
    """`headrace-engine`, or another command with its flags, on a free port; ends with SIGTERM when the block does."""

    def __init__(
        self,
        folder: Path,
        *flags: str,
        environ: Mapping[str, str] | None = None,
        command: Sequence[str | Path] = (SCRIPT,),
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._port_file = folder / "port"
        self._port_file.unlink(missing_ok=True)  # of an earlier engine in this folder
        self.log = folder / "engine.log"
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [*command, "--port", "0", "--port-file", str(self._port_file), "--threads", "1", *flags],
                env=engine_environ(**(environ or {})),
                stderr=log,
            )
        self.url = f"http://127.0.0.1:{wait_until(self._port, READY_SECONDS, 'the port file')}"

    def _port(self) -> str:
        assert self.process.poll() is None, self.log.read_text()
        return self._port_file.read_text().strip() if self._port_file.exists() else ""

    def __enter__(self) -> EngineProcess:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.process.poll() is None:
            self.terminate()

    def wait_ready(self) -> EngineProcess:
        wait_until(lambda: self.status("/health") == 200, READY_SECONDS, "the engine's health")
        return self

    def terminate(self, timeout: float = 30.0) -> int:
        """Send SIGTERM and return the exit code; killed when it does not end."""
        self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            raise

    def status(self, path: str) -> int:
        assert self.process.poll() is None, self.log.read_text()
        return requests.get(self.url + path, timeout=30).status_code

    def info(self) -> dict[str, Any]:
        table: dict[str, Any] = requests.get(f"{self.url}/get_server_info", timeout=30).json()
        return table

    def in_flight(self) -> int:
        return int(self.info()["headrace"]["requests"]["in_flight"])

    def post(self, path: str, body: Any, timeout: float = 120.0) -> requests.Response:
        return requests.post(self.url + path, json=body, timeout=timeout)

    def generate(
        self, ids: Sequence[int], rid: str | None = None, max_new_tokens: int = 0, timeout: float = 120.0, **more: Any
    ) -> requests.Response:
        """POST one prompt, as the dispatcher does."""
        sampling = {"max_new_tokens": max_new_tokens, "temperature": 0, **more}
        return self.post("/generate", {"input_ids": list(ids), "rid": rid, "sampling_params": sampling}, timeout)


def random_ids(count: int, *, seed: int, vocab: int = 400) -> list[int]:
    """Token ids without the special ones."""
    rng = random.Random(f"{seed}/{count}")
    return [rng.randrange(3, vocab) for _ in range(count)]

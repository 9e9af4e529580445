"""A real SGLang server as a process of its own session, with the plugin at work or without."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import time
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from headrace.dumpfolder import read_problem
from headrace.dumps import ENGINE_FILE, PROBLEM_FILE
from headrace.errors import HeadraceError

_STOP_SECONDS = 20.0
_LOG_TAIL = 40  # lines of a failed server's log that are shown
_NOISE = "Ignore import error"  # of models that lack a package, by the dozen

_FLAGS: Mapping[str, tuple[str, ...]] = {
    # No kernel here needs more than PyTorch, Triton and sgl_kernel. No prefill graph: what a replayed one computes
    # does not pass by the logits processor.
    "cuda": (
        *("--attention-backend", "triton", "--sampling-backend", "pytorch", "--grammar-backend", "none"),
        *("--disable-cuda-graph", "--disable-prefill-cuda-graph"),
        *("--chunked-prefill-size", "16384", "--max-prefill-tokens", "16384", "--context-length", "32768"),
        *("--mem-fraction-static", "0.6", "--max-total-tokens", "131072"),
    ),
    "cpu": (
        *("--device", "cpu", "--attention-backend", "torch_native", "--disable-cuda-graph", "--sleep-on-idle"),
        *("--chunked-prefill-size", "2048", "--max-prefill-tokens", "2048", "--context-length", "16384"),
        *("--mem-fraction-static", "0.1", "--max-total-tokens", "32768"),
    ),
}
_COMMON = ("--host", "127.0.0.1", "--load-format", "dummy", "--skip-tokenizer-init", "--skip-server-warmup")


class ServerFailed(HeadraceError):
    """A server did not start, or captures nothing; its log says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """How a server is started: `command` without flags, and `environ`, all of its variables but HEADRACE_DUMP_DIR.

    `device` is `cpu` or `cuda`; `flags` come last and win.
    """

    command: tuple[str, ...]
    environ: Mapping[str, str]
    device: str
    flags: tuple[str, ...] = ()

    def arguments(self, model: Path, port: int) -> list[str]:
        """The whole command line."""
        own = ("--model-path", str(model), "--port", str(port))
        return [*self.command, *_COMMON, *_FLAGS[self.device], *own, *self.flags]


class Server:
    """One server, from `with` to the block's end; with `dumps` its plugin captures into that folder."""

    def __init__(self, launch: Launch, model: Path, log: Path, dumps: Path | None = None) -> None:
        self.dumps = dumps
        self._log = log
        self._port = _free_port()
        environ = {name: value for name, value in launch.environ.items() if name != "HEADRACE_DUMP_DIR"}
        self._environ = environ if dumps is None else environ | {"HEADRACE_DUMP_DIR": str(dumps)}
        self._arguments: Sequence[str] = launch.arguments(model, self._port)
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        """Where it listens."""
        return f"http://127.0.0.1:{self._port}"

    @property
    def session(self) -> int:
        """The session of all its processes."""
        assert self._process is not None
        return self._process.pid

    def __enter__(self) -> Server:
        """Start it; `wait` says when it serves."""
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                self._arguments,
                env=dict(self._environ),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        process = self._process
        if process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_STOP_SECONDS)
        with contextlib.suppress(ProcessLookupError):  # what SIGTERM left, as a scheduler in the middle of a forward
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()

    def wait(self, seconds: float) -> None:
        """Wait until it serves and, with `dumps`, until its plugin has declared itself.

        Raises:
            ServerFailed: it ended, is late, or captures nothing.
        """
        assert self._process is not None
        deadline = time.monotonic() + seconds
        while not self._serves():
            if self._process.poll() is not None:
                raise ServerFailed(f"the server ended with {self._process.returncode}:\n{self._tail()}")
            if time.monotonic() > deadline:
                raise ServerFailed(f"the server does not serve after {seconds:.0f} s:\n{self._tail()}")
            time.sleep(0.5)
        if self.dumps is not None and not (self.dumps / ENGINE_FILE).exists():
            raise ServerFailed(f"the server serves, but captures nothing: {self._problem()}")

    def _serves(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}/health", timeout=5) as answer:
                return bool(answer.status == 200)
        except OSError:  # no connection yet, or a 503
            return False

    def _problem(self) -> str:
        assert self.dumps is not None
        with contextlib.suppress(OSError, HeadraceError):
            return read_problem(self.dumps / PROBLEM_FILE).problem
        return f"is the plugin installed in its environment?\n{self._tail('headrace')}"

    def _tail(self, word: str = "") -> str:
        """The log's last lines; those with `word` and what came after them, if there are any."""
        lines = [text for text in self._log.read_text(errors="replace").splitlines() if _NOISE not in text]
        first = next((number for number, text in enumerate(lines) if word in text), 0) if word else 0
        return "\n".join(lines[first : first + _LOG_TAIL] if first else lines[-_LOG_TAIL:])


def _free_port() -> int:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        return int(held.getsockname()[1])

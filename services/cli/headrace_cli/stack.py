"""All services of one machine as child processes on loopback, in one folder; used by the demo and the tests."""

from __future__ import annotations

import ctypes
import os
import random
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.request import urlopen

from headrace.bus import Bus
from headrace.errors import HeadraceError, Unavailable
from headrace_cli.valkey import server_binary

SERVICES = ("redis", "engine", "watcher", "writer", "dispatcher")
# The dispatcher drains first, the store goes last, so that what was captured is still stored.
_STOP_ORDER = ("dispatcher", "watcher", "writer", "engine", "redis")
_STOP_SECONDS = 30.0
_PR_SET_PDEATHSIG = 1
_PORTS = range(10_000, 32_768)  # outgoing connections take theirs above


@dataclass(frozen=True, slots=True, kw_only=True)
class StackConfig:
    """Where the stack lives and what it serves.

    `model` is a checkpoint folder, `model_name` how the engine names it. `redis_url` is a server that is there
    already; empty starts one in the folder. `engine_url` is an engine that is there already and dumps into
    `dump_dir`; empty starts headrace-engine, with `engine` as further flags. `environ` are further variables of every
    service; `dump_dir` defaults to a folder of the stack.
    """

    folder: Path
    model: Path
    model_name: str
    redis_url: str = ""
    redis_password: str = ""
    dump_dir: Path | None = None
    engine_url: str = ""
    engine: tuple[str, ...] = ()
    environ: Mapping[str, str] = field(default_factory=dict)


class Stack:
    """Starts, kills, restarts and stops the services; a context manager that stops what it started."""

    def __init__(self, config: StackConfig) -> None:
        """Choose ports and write the files that the services read; nothing runs yet."""
        self.config = config
        self.folder = config.folder.absolute()
        self.dump_dir = (config.dump_dir or self.folder / "dumps").absolute()
        self.logs = self.folder / "logs"
        self.logs.mkdir(parents=True, exist_ok=True)
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        ports = free_ports(len(SERVICES) + 1)
        self._health = dict(zip(SERVICES, ports, strict=False))
        self._engine_port = ports[-1]
        self._password = config.redis_password if config.redis_url else secrets.token_hex(16)
        self.redis_url = config.redis_url or f"redis://127.0.0.1:{self._health['redis']}/0"
        self._password_file = self.folder / "redis-password"
        _write_private(self._password_file, self._password)

    @property
    def engine_url(self) -> str:
        """Where the engine listens."""
        return self.config.engine_url or f"http://127.0.0.1:{self._engine_port}"

    def health_url(self, name: str) -> str:
        """Where a service answers `/metrics`, `/healthz` and `/readyz`."""
        return f"http://127.0.0.1:{self._health[name]}"

    def bus(self) -> Bus:
        """A bus over the stack's Redis."""
        return Bus.open(self.redis_url, self._password)

    def start(self, name: str) -> None:
        """Start one service; it need not be ready when this returns. Its output goes to `logs/{name}.log`.

        Raises:
            Unavailable: the Redis that is there already does not answer.
            UsageError: it refuses the password.
        """
        if name == "redis" and self.config.redis_url:
            self.bus().close()  # or it would be waited for in vain
            return
        if name == "engine" and self.config.engine_url:
            return
        command, environ = self._command(name)
        with (self.logs / f"{name}.log").open("ab") as log, _signals_held():
            self._processes[name] = subprocess.Popen(
                command,
                env=environ,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=self.folder,
                start_new_session=True,  # Ctrl-C is for the supervisor, which stops the others in order
                preexec_fn=die_with_parent,
            )

    def wait_ready(self, name: str, timeout: float, idle: Callable[[], None] | None = None) -> None:
        """Wait until a service says that it is ready.

        Raises:
            Unavailable: it ended, or is not ready in time; the message has its last lines.
        """
        until = time.monotonic() + timeout
        while not self.ready(name):
            process = self._processes.get(name)
            if process is not None and process.poll() is not None:
                raise Unavailable(f"{name} ended with code {process.returncode}{self._last_words(name)}")
            if time.monotonic() > until:
                raise Unavailable(f"{name} is not ready after {timeout:.0f} s{self._last_words(name)}")
            if idle is not None:
                idle()
            time.sleep(0.1)

    def ready(self, name: str) -> bool:
        """Whether a service says that it is ready."""
        if name == "redis":
            try:
                self.bus().close()
            except HeadraceError:
                return False
            return True
        url = f"{self.engine_url}/health" if name == "engine" else f"{self.health_url(name)}/readyz"
        try:
            with urlopen(url, timeout=2) as answer:
                return bool(answer.status == 200)
        except OSError:
            return False

    def check(self) -> None:
        """Raise Unavailable when a service that was started has ended."""
        for name, code in self.ended().items():
            raise Unavailable(f"{name} ended with code {code}{self._last_words(name)}")

    def ended(self) -> dict[str, int]:
        """Services that were started and ended by themselves, with their exit codes."""
        codes = {name: process.poll() for name, process in self._processes.items()}
        return {name: code for name, code in codes.items() if code is not None}

    def tail(self, name: str, lines: int = 5) -> str:
        """The last lines of a service's log."""
        try:
            return "\n".join((self.logs / f"{name}.log").read_text(errors="replace").splitlines()[-lines:])
        except FileNotFoundError:
            return ""

    def _last_words(self, name: str) -> str:
        words = " | ".join(self.tail(name).splitlines()) or "nothing"
        return f"; the last lines of {self.logs / f'{name}.log'}: {words}"

    def pid(self, name: str) -> int:
        """The process id of a service."""
        return self._processes[name].pid

    def kill(self, name: str) -> None:
        """kill -9."""
        process = self._processes[name]
        process.kill()
        process.wait()
        del self._processes[name]

    def stop_one(self, name: str) -> int:
        """SIGTERM, then kill -9 after 30 s. Returns the exit code."""
        process = self._processes[name]
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(_STOP_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        del self._processes[name]
        return process.returncode

    def stop(self) -> dict[str, int]:
        """Stop all, in order. Returns the exit codes."""
        return {name: self.stop_one(name) for name in _STOP_ORDER if name in self._processes}

    def __enter__(self) -> Stack:
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self.stop()
        except BaseException:  # somebody who does not want to wait for an orderly end
            for name in list(self._processes):
                self.kill(name)
            raise

    def _command(self, name: str) -> tuple[list[str], dict[str, str]]:
        if name == "redis":
            return [str(server_binary()), str(self._redis_config())], dict(os.environ)
        environ = {key: value for key, value in os.environ.items() if not key.startswith("HEADRACE_")}
        environ["HEADRACE_DUMP_DIR"] = str(self.dump_dir)
        command = [sys.executable, "-c", f"from headrace_{name}.main import run; run()"]
        if name == "engine":
            command += ["--model", str(self.config.model), "--model-name", self.config.model_name]
            command += ["--port", str(self._engine_port), *self.config.engine]
            return command, {**environ, **self.config.environ}
        environ |= {
            "HEADRACE_REDIS_URL": self.redis_url,
            "HEADRACE_REDIS_PASSWORD_FILE": str(self._password_file),
            "HEADRACE_ENGINE_URL": self.engine_url,
            "HEADRACE_HEALTH_PORT": str(self._health[name]),
            "HEADRACE_QUARANTINE_DIR": str(self.folder / "quarantine"),
        }
        return command, {**environ, **self.config.environ}

    def _redis_config(self) -> Path:
        data = self.folder / "redis"
        data.mkdir(exist_ok=True)
        path = self.folder / "redis.conf"
        options = (
            "bind 127.0.0.1",
            f"port {self._health['redis']}",
            f'dir "{data}"',
            f"requirepass {self._password}",
            "appendonly yes",
            "appendfsync everysec",
            'save ""',
            "maxmemory-policy noeviction",
        )
        _write_private(path, "\n".join(options) + "\n")
        return path


def free_ports(count: int) -> list[int]:
    """TCP ports of the loopback that nobody listens on now.

    None is of the range from which outgoing connections take theirs: a service that is started again must find its own
    port free.
    """
    ports: list[int] = []
    for port in random.SystemRandom().sample(_PORTS, len(_PORTS)):
        try:
            socket.create_server(("127.0.0.1", port)).close()
        except OSError:
            continue
        ports.append(port)
        if len(ports) == count:
            return ports
    raise Unavailable(f"fewer than {count} TCP ports from {_PORTS.start} to {_PORTS.stop - 1} are free; free some")


def _write_private(path: Path, text: str) -> None:
    path.unlink(missing_ok=True)
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(text)


@contextmanager
def _signals_held() -> Iterator[None]:
    """Put off what Ctrl-C and SIGTERM do, so that it never comes between a child's birth and our knowing of it.

    By the handlers and not by a mask: a mask is one thread's, and another thread would take the signal.
    """
    if threading.current_thread() is not threading.main_thread():  # handlers run in the main thread alone
        yield
        return
    came: list[int] = []
    before: dict[int, Any] = {}
    try:
        for number in (signal.SIGINT, signal.SIGTERM):
            before[number] = signal.getsignal(number)
            signal.signal(number, lambda number, _: came.append(number))
        yield
    finally:
        for held, handler in before.items():
            signal.signal(held, handler)
        if came:
            signal.raise_signal(came[0])


def die_with_parent(number: int = signal.SIGKILL) -> None:
    """A supervisor that is killed takes its children along (Linux only; elsewhere they stay)."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, number)

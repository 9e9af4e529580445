"""A real Redis-compatible server for tests, which can be stopped, killed and started again in its folder."""

from __future__ import annotations

import contextlib
import subprocess
from pathlib import Path

import redis

from headrace_cli.stack import free_ports
from headrace_cli.valkey import server_binary
from tests.support.waiting import wait_until


def free_port() -> int:
    """A TCP port of the loopback that nobody listens on now, and that no outgoing connection takes meanwhile."""
    return free_ports(1)[0]


class ValkeyServer:
    """One server on the loopback; port and folder stay the same over restarts.

    With `aof` it appends what it did to a file, fsynced every second, as a production server does; without, a
    restart begins empty.
    """

    def __init__(self, folder: Path, port: int | None = None, aof: bool = False, password: str | None = None) -> None:
        self.folder = folder
        self.port = port or free_port()
        self.aof = aof
        self.password = password
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        """Where it listens, without the password."""
        return f"redis://127.0.0.1:{self.port}/0"

    @property
    def pid(self) -> int:
        """The process's id; it must be running."""
        assert self._process is not None, "the server is not running"
        return self._process.pid

    def client(self) -> redis.Redis:
        """A plain client, for looking behind the bus."""
        return redis.Redis(port=self.port, password=self.password, socket_timeout=5)

    def start(self, *, wait: bool = True) -> None:
        """Start the process; `wait` until it answers. Another process may have taken a port: then AssertionError."""
        assert self._process is None, "the server runs already"
        self.folder.mkdir(parents=True, exist_ok=True)
        options = {
            "port": str(self.port),
            "bind": "127.0.0.1",
            "dir": str(self.folder),
            "save": "",
            "appendonly": "yes" if self.aof else "no",
            "appendfsync": "everysec",
            "maxmemory-policy": "noeviction",
            "logfile": str(self.folder / "server.log"),
        }
        if self.password is not None:
            options["requirepass"] = self.password
        command = [str(server_binary())]
        for name, value in options.items():
            command += (f"--{name}", value)
        self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
        if wait:
            wait_until(self._answers, 20, f"an answer of the Redis server on port {self.port}")

    def _answers(self) -> bool:
        assert self._process is not None
        assert self._process.poll() is None, f"the Redis server ended; see {self.folder / 'server.log'}"
        with contextlib.closing(self.client()) as client, contextlib.suppress(redis.ConnectionError):
            return bool(client.ping())
        return False

    def stop(self) -> None:
        """End it as an operator does: what it holds is on disk if `aof`."""
        self._end(kill=False)

    def kill(self) -> None:
        """kill -9: what was not fsynced may be lost with the machine, what was written stays."""
        self._end(kill=True)

    def restart(self) -> None:
        """Stop and start."""
        self.stop()
        self.start()

    def _end(self, *, kill: bool) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        if kill:
            process.kill()
        else:
            process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(10)

    def __enter__(self) -> ValkeyServer:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

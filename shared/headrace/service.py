"""The shell of a service: signals, metrics and health on one port, and errors as one line."""

from __future__ import annotations

import errno
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import FrameType

from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

from headrace import __version__, logs
from headrace.errors import Conflict, HeadraceError, UsageError
from headrace.settings import Settings, load_settings

_REQUEST_SECONDS = 10  # for a client that connects and sends nothing: each holds a thread


class Health:
    """What `/readyz` says: ready when no part has a reason against it. `/healthz` says the process lives."""

    def __init__(self, *parts: str) -> None:
        """Start with every part not ready."""
        self._lock = threading.Lock()
        self._reasons = dict.fromkeys(parts, "starting")

    def set(self, part: str, reason: str = "") -> None:
        """Say why a part is not ready; an empty reason means that it is."""
        with self._lock:
            self._reasons[part] = reason

    def problems(self) -> dict[str, str]:
        """The parts that are not ready, with their reasons."""
        with self._lock:
            return {part: reason for part, reason in self._reasons.items() if reason}


class Service:
    """What a service's loop gets: its settings, a stop event that SIGTERM sets, and its health."""

    def __init__(self, name: str, settings: Settings, health: Health) -> None:
        """Made by `run`."""
        self.name = name
        self.settings = settings
        self.health = health
        self.stop = threading.Event()


def run(name: str, loop: Callable[[Service], None], *parts: str, about: str) -> None:
    """Run a service until SIGTERM or SIGINT, and exit: 0, or the code of the error that ended it.

    `parts` are what must be ready before the service is; `about` says in a sentence what it does, for `--help`.
    """
    try:
        if answer := _answer(name, about, sys.argv[1:]):
            sys.stdout.write(f"{answer}\n")
            return
        settings = load_settings()
        logs.configure(name, settings.log_level, settings.log_format)
        service = Service(name, settings, Health(*parts))
        _install_signals(service.stop)
        with serving(settings.health_host, settings.health_port, service.health):
            loop(service)
    except HeadraceError as error:
        sys.stderr.write(f"headrace-{name}: {error}\n")
        sys.exit(error.exit_code)


def _answer(name: str, about: str, arguments: Sequence[str]) -> str:
    """What `--help` and `--version` say; empty without arguments, since settings are variables."""
    match arguments:
        case []:
            return ""
        case ["--help" | "-h"]:
            return (
                f"headrace-{name} {about} It runs until SIGTERM and takes no arguments: its settings are HEADRACE_* "
                "variables, or a TOML file that HEADRACE_CONFIG names; see the README."
            )
        case ["--version"]:
            return f"headrace-{name} {__version__}"
    raise UsageError(f"{' '.join(arguments)!r}: no arguments are taken, settings are HEADRACE_* variables; see --help")


def _install_signals(stop: threading.Event) -> None:
    def on_signal(number: int, frame: FrameType | None) -> None:
        stop.set()

    signal.signal(signal.SIGTERM, on_signal)
    signal.signal(signal.SIGINT, on_signal)


@contextmanager
def serving(host: str, port: int, health: Health) -> Iterator[None]:
    """Serve `/metrics`, `/healthz` and `/readyz` in a thread; port 0 serves nothing.

    Raises:
        Conflict: the port is taken.
        UsageError: the host or the port cannot be listened on.
    """
    if port == 0:
        yield
        return
    try:
        server = ThreadingHTTPServer((host, port), _handler(health))
    except (OSError, UnicodeError) as error:  # a host that cannot be a name is a UnicodeError
        message = f"port {port} on {host}: {getattr(error, 'strerror', None) or error}; set HEADRACE_HEALTH_PORT"
        if isinstance(error, OSError) and error.errno == errno.EADDRINUSE:
            raise Conflict(message) from error
        raise UsageError(f"{message} or HEADRACE_HEALTH_HOST") from error
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, name="health", daemon=True)
    thread.start()
    try:
        yield
    finally:
        server.shutdown()
        server.server_close()


def _handler(health: Health) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        timeout = _REQUEST_SECONDS

        def do_GET(self) -> None:
            match self.path.partition("?")[0]:
                case "/metrics":
                    self._answer(200, generate_latest(), CONTENT_TYPE_LATEST)
                case "/healthz":
                    self._answer(200, b"ok\n")
                case "/readyz":
                    problems = health.problems()
                    body = "".join(f"{part}: {reason}\n" for part, reason in problems.items()) or "ready\n"
                    self._answer(503 if problems else 200, body.encode())
                case _:
                    self._answer(404, b"/metrics, /healthz or /readyz\n")

        def _answer(self, status: int, body: bytes, kind: str = "text/plain; charset=utf-8") -> None:
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            """Probes come every few seconds: not logged."""

    return Handler

"""`headrace-engine`: binds its port, loads the model, answers until it is told to stop."""

from __future__ import annotations

import errno
import os
import signal
import socket
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import uvicorn

from headrace import logs
from headrace.errors import Conflict, HeadraceError, Unavailable, UsageError
from headrace_capture.config import CaptureConfig
from headrace_engine.capturing import OpenCapture, open_capture
from headrace_engine.engine import Engine
from headrace_engine.server import create_app
from headrace_engine.settings import EngineSettings, load_settings

_log = logs.get(__name__)
_LEAVE = 5  # seconds for answers to leave the process once it is told to stop


def run() -> None:
    """Run the engine, as the console script."""
    code = main(sys.argv[1:], os.environ)
    sys.stderr.flush()
    sys.exit(code)


def main(arguments: Sequence[str], environ: Mapping[str, str], open_capture: OpenCapture = open_capture) -> int:
    """Serve, capturing if the environment asks for it, until SIGTERM or SIGINT; returns the exit code."""
    try:
        settings = load_settings(arguments, environ)
        logs.configure("engine", settings.log_level, settings.log_format)
        return _serve(settings, CaptureConfig.from_environ(environ), open_capture)
    except HeadraceError as error:
        sys.stderr.write(f"headrace-engine: {error}\n")
        return error.exit_code


def _serve(settings: EngineSettings, capture_config: CaptureConfig | None, open_capture: OpenCapture) -> int:
    listener = _listen(settings.host, settings.port)
    port = listener.getsockname()[1]

    def stop(*_: object) -> None:
        server.should_exit = True

    engine = Engine(settings, capture_config, stop, open_capture)
    config = uvicorn.Config(
        create_app(engine), log_config=None, log_level="warning", access_log=False, timeout_graceful_shutdown=_LEAVE
    )
    server = _Server(config, engine)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, stop)  # before uvicorn takes them, and after: it raises them again when it is done
    engine.start()
    if settings.port_file:
        _write_whole(settings.port_file, f"{port}\n")
    _log.info("listening", host=settings.host, port=port, model=settings.name, capture=capture_config is not None)
    server.run(sockets=[listener])
    ended = engine.close()
    _log.info("stopped")
    code = 0
    if engine.failure:
        sys.stderr.write(f"headrace-engine: {engine.failure}\n")
        code = engine.failure.exit_code
    if not ended:
        # A thread in the middle of torch's native code would crash the interpreter's own exit.
        sys.stderr.flush()
        os._exit(code)
    return code


class _Server(uvicorn.Server):
    """Tells the engine to drain before it waits for the connections of the requests in flight."""

    def __init__(self, config: uvicorn.Config, engine: Engine) -> None:
        super().__init__(config)
        self._engine = engine

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._engine.drain()
        await super().shutdown(sockets)


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=2048)
    except (OSError, UnicodeError) as error:  # a host that cannot be a name is a UnicodeError
        taken = isinstance(error, OSError) and error.errno == errno.EADDRINUSE
        kind = Conflict if taken else UsageError
        message = f"cannot listen on {host} port {port}: {getattr(error, 'strerror', None) or error}"
        raise kind(f"{message}; choose another {'--port' if taken else '--host or --port'}") from error


def _write_whole(path: Path, text: str) -> None:
    new = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        new.write_text(text)
        new.replace(path)
    except OSError as error:
        raise Unavailable(f"cannot write the port file {path}: {error.strerror}; choose another --port-file") from error

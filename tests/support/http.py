"""HTTP in tests: a GET of a service's port, and a server in a thread whose answers a test decides."""

from __future__ import annotations

import threading
import urllib.error
import urllib.request
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Self


def get(port: int, path: str) -> tuple[int, str]:
    """Status and body; 0 where nobody answers."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=5) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()
    except urllib.error.URLError:
        return 0, ""


class StubServer:
    """A server on the loopback, in a thread; a subclass says what it answers."""

    def __init__(self) -> None:
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(self))
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02})

    @property
    def url(self) -> str:
        """Where it listens."""
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def answer(self, method: str, path: str, body: bytes) -> tuple[int, bytes]:
        """Status and content of the answer to one request."""
        raise NotImplementedError

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


def _handler(stub: StubServer) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            self._answer("GET", b"")

        def do_POST(self) -> None:
            self._answer("POST", self.rfile.read(int(self.headers["Content-Length"])))

        def _answer(self, method: str, body: bytes) -> None:
            status, content = stub.answer(method, self.path, body)
            self.send_response(status)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, format: str, *args: object) -> None:
            pass

    return Handler

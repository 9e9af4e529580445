from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest
import redis

from headrace.bus import Bus, keys
from headrace.bus.client import connect, redact
from headrace.errors import HeadraceError, Unavailable, UsageError
from tests.support.bus_values import RUN, SITE, capture, claim, make_attempt, make_site, start_run
from tests.support.server import ValkeyServer, free_port

pytestmark = pytest.mark.redis


@contextmanager
def answering(reply: bytes) -> Iterator[str]:
    """Something at a port that gives every command the same answer."""

    def serve(connection: socket.socket) -> None:
        with connection:
            while connection.recv(65536):
                connection.sendall(reply)

    def accept(listener: socket.socket) -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            threading.Thread(target=serve, args=(connection,), daemon=True).start()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=accept, args=(listener,), daemon=True).start()
        yield f"redis://127.0.0.1:{listener.getsockname()[1]}/0"
        listener.shutdown(socket.SHUT_RDWR)


def error_of(url: str, password: str = "") -> tuple[HeadraceError, float]:
    began = time.monotonic()
    with pytest.raises(HeadraceError) as error:
        Bus.open(url, password)
    return error.value, time.monotonic() - began


def test_no_server_is_said_within_seconds_with_the_variable_to_set() -> None:
    error, seconds = error_of(f"redis://127.0.0.1:{free_port()}/0")
    assert isinstance(error, Unavailable)
    assert "HEADRACE_REDIS_URL" in str(error)
    assert "127.0.0.1" in str(error)
    assert seconds < 8


def test_a_host_that_is_none_is_said() -> None:
    error, _ = error_of("redis://no-such-host.invalid:6379/0")
    assert isinstance(error, Unavailable)
    assert "no-such-host.invalid" in str(error)


@pytest.mark.parametrize(
    "url", ["", "http://h", "redis://h:port/0", "redis://h:99999/0", "redis://[::1", "redis://h/0?nonsense=1"]
)
def test_a_wrong_url_is_a_usage_error(url: str) -> None:
    error, _ = error_of(url)
    assert isinstance(error, UsageError)
    assert "HEADRACE_REDIS_URL" in str(error)


def test_passwords(tmp_path: Path) -> None:
    with ValkeyServer(tmp_path / "redis", password="right horse") as server:
        Bus.open(server.url, "right horse").close()
        Bus.open(server.url.replace("//", "//:right%20horse@")).close()
        for given in ("", "wrong"):
            error, seconds = error_of(server.url, given)
            assert isinstance(error, UsageError)
            assert "HEADRACE_REDIS_PASSWORD_FILE" in str(error)
            assert "wrong" not in str(error).replace("WRONGPASS", "")
            assert seconds < 8


def test_a_password_never_shows() -> None:
    assert redact("redis://user:secret@h:1/0") == "redis://user:***@h:1/0"
    assert redact("redis://:secret@h:1/0") == "redis://:***@h:1/0"
    assert redact("redis://h:1/0") == "redis://h:1/0"
    error, _ = error_of(f"redis://:secret@127.0.0.1:{free_port()}/0")
    assert "secret" not in str(error)


@pytest.mark.parametrize(
    "reply",
    [
        b"-LOADING Redis is loading the dataset in memory\r\n",
        b"-MISCONF Redis is configured to save RDB snapshots, but it's currently unable to persist to disk\r\n",
        b"-READONLY You can't write against a read only replica.\r\n",
        b"-BUSY Redis is busy running a script. You can only call SCRIPT KILL or SHUTDOWN NOSAVE.\r\n",
        b"-OOM command not allowed when used memory > 'maxmemory'.\r\n",
        b"-ERR Error running script (call to f_1): @user_script:9: -OOM command not allowed when used memory\r\n",
    ],
)
def test_a_server_that_cannot_serve_now_is_unavailable(reply: bytes) -> None:
    with answering(reply) as url:
        error, seconds = error_of(url)
    assert isinstance(error, Unavailable)
    assert seconds < 8


def test_a_database_that_the_server_has_not_is_a_usage_error(redis_url: str) -> None:
    error, _ = error_of(f"{redis_url.rpartition('/')[0]}/99999")
    assert isinstance(error, UsageError)
    assert "/99999" in str(error)
    assert "HEADRACE_REDIS_URL" in str(error)


@pytest.mark.parametrize(
    "reply",
    [b"-ERR what nobody expects\r\n", b"-MOVED 1 127.0.0.1:7000\r\n", b"HTTP/1.1 400 Bad Request\r\n\r\n", b"\r\n"],
)
def test_whatever_else_a_server_says_is_an_error_of_ours(reply: bytes) -> None:
    with answering(reply) as url:
        error, _ = error_of(url)
    assert url in str(error)
    assert "HEADRACE_REDIS_URL" in str(error)


def content(client: redis.Redis, key: bytes) -> object:
    """What a key holds. DUMP will not do: the order of a hash's fields in it changes by itself while Redis rehashes."""
    match client.type(key):
        case b"hash":
            return client.hgetall(key)
        case b"zset":
            return client.zrange(key, 0, -1, withscores=True)
        case b"set":
            return client.smembers(key)
        case _:
            return client.dump(key)


def test_a_full_server_is_unavailable_and_changes_nothing_by_halves(tmp_path: Path) -> None:
    with ValkeyServer(tmp_path / "redis") as server:
        bus = Bus.open(server.url)
        start_run(bus)
        one, two = claim(bus, make_attempt(0), make_attempt(1))
        capture(bus, two)
        with server.client() as client:
            client.config_set("maxmemory", 1)

            def dump() -> dict[bytes, object]:
                return {key: content(client, key) for key in client.scan_iter()}

            before = dump()
            for call in (
                lambda: claim(bus, make_attempt(2)),
                lambda: capture(bus, one),
                lambda: bus.requests.renew(RUN, [str(one)]),
                lambda: bus.runs.feed(RUN, 5, [""]),
            ):
                try:
                    call()
                except Unavailable:
                    assert dump() == before
                else:
                    before = dump()
            # What had begun to free memory is done whole.
            outcome = bus.requests.end(one, burn=True, kind="error", reason="timeout")
            assert outcome == "pending"
            assert bus.runs.pending(RUN, 9)[-1] == 0
            client.config_set("maxmemory", 0)
        assert bus.sites.load(make_site()).requests == 0
        bus.close()


def test_a_bus_lives_through_a_restart_with_what_was_written(tmp_path: Path) -> None:
    server = ValkeyServer(tmp_path / "redis", aof=True)
    with server:
        bus = Bus.open(server.url)
        start_run(bus)
        (request,) = claim(bus, make_attempt(0))
        first = bus.server_clock()[0]
        server.stop()
        with pytest.raises(Unavailable):
            bus.ping()
        server.start()
        assert bus.server_clock()[0] != first
        capture(bus, request)
        assert bus.redis.zcard(keys.captured(SITE)) == 1
        bus.close()


def test_a_call_waits_through_a_short_absence(tmp_path: Path) -> None:
    server = ValkeyServer(tmp_path / "redis", aof=True)
    with server:
        bus = Bus.open(server.url)
        server.stop()
        server.start()
        bus.ping()
        bus.close()


def test_more_threads_than_connections_wait_for_one(redis_url: str) -> None:
    client = connect(redis_url, connections=3)
    bus = Bus(client)
    with ThreadPoolExecutor(24) as pool:
        for _ in pool.map(lambda _: bus.ping(), range(200)):
            pass
    bus.close()

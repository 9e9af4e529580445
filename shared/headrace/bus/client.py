"""The connection to Redis: time-outs, retries, and errors that name the next step."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit, urlunsplit

import redis
from redis.backoff import ExponentialWithJitterBackoff
from redis.retry import Retry

from headrace.errors import HeadraceError, RedisAway, UsageError

# Above every blocking read (RQ's workers set their own), so that an idle wait is not taken for a dead server.
SOCKET_TIMEOUT = 10.0
CONNECT_TIMEOUT = 3.0
# How a server that cannot write now says so, also from within a script.
_NO_WRITES = ("MISCONF", "OOM command", "READONLY", "NOREPLICAS", "MASTERDOWN")


def connect(url: str, password: str = "", *, connections: int = 32) -> redis.Redis:
    """Open a pool of at most `connections`, for which further threads wait; nothing is sent yet.

    Every change that headrace makes is idempotent, so a command that timed out is sent again.

    Raises:
        UsageError: the URL is not a Redis URL.
    """
    try:
        pool = redis.BlockingConnectionPool.from_url(
            url,
            password=password or None,
            max_connections=connections,
            timeout=SOCKET_TIMEOUT,
            socket_timeout=SOCKET_TIMEOUT,
            socket_connect_timeout=CONNECT_TIMEOUT,
            health_check_interval=30,
            retry=Retry(ExponentialWithJitterBackoff(base=0.05, cap=0.5), retries=3),
        )
        pool.connection_class(**pool.connection_kwargs)  # an unknown option in the URL shows only here
    except (ValueError, TypeError) as error:
        raise UsageError(f"HEADRACE_REDIS_URL {redact(url)!r}: {error}") from error
    return redis.Redis.from_pool(pool)


def redact(url: str) -> str:
    """The URL without its password."""
    try:
        parts = urlsplit(url)
    except ValueError:
        return "(not a URL)"
    if parts.password is None:
        return url
    host = parts.netloc.rpartition("@")[2]
    return urlunsplit(parts._replace(netloc=f"{parts.username or ''}:***@{host}"))


@contextmanager
def translated(where: str) -> Iterator[None]:
    """Turn what redis-py raises into our errors; `where` names the server in the message.

    Raises:
        UsageError: the password, the user or the number of the database is wrong.
        RedisAway: no connection, a time-out, or a server that is loading, busy, read-only or full.
        HeadraceError: the server says anything else that is not expected of a Redis of 6.2.
    """
    try:
        yield
    except (redis.AuthenticationError, redis.exceptions.NoPermissionError) as error:
        raise UsageError(
            f"Redis at {where} refused the password ({error}); set HEADRACE_REDIS_PASSWORD_FILE"
        ) from error
    except (redis.ConnectionError, redis.TimeoutError) as error:
        raise RedisAway(f"no Redis at {where} ({error}); start it or set HEADRACE_REDIS_URL") from error
    except (redis.exceptions.OutOfMemoryError, redis.exceptions.ReadOnlyError) as error:
        raise RedisAway(f"Redis at {where} takes no writes: {error}") from error
    except redis.ResponseError as error:
        if any(sign in str(error) for sign in _NO_WRITES):
            raise RedisAway(f"Redis at {where} takes no writes: {error}") from error
        if str(error).startswith("BUSY "):  # somebody's script runs for longer than the server's limit
            raise RedisAway(f"Redis at {where} answers nobody now: {error}") from error
        if str(error).startswith(("NOAUTH", "WRONGPASS", "NOPERM")):
            message = f"Redis at {where} refused the password ({error}); set HEADRACE_REDIS_PASSWORD_FILE"
            raise UsageError(message) from error
        if "DB index" in str(error):
            message = f"Redis at {where} has no such database ({error}); set HEADRACE_REDIS_URL to one that it has"
            raise UsageError(message) from error
        raise _unexpected(where, error) from error
    except redis.RedisError as error:  # also what is no Redis at all
        raise _unexpected(where, error) from error


def _unexpected(where: str, error: redis.RedisError) -> HeadraceError:
    return HeadraceError(f"Redis at {where}: {error}; is HEADRACE_REDIS_URL a Redis of 6.2 or newer, not a cluster?")


def text(reply: Any) -> str:
    """A reply as text; redis-py types replies as bytes or str, and ours are bytes."""
    return reply.decode() if isinstance(reply, bytes) else str(reply)

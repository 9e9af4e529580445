"""Which Redis-compatible server is started."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from headrace_cli.valkey import server_binary


def place(folder: Path, name: str, says: str) -> Path:
    """A program of this name that says this as its version."""
    path = folder / name
    path.write_text(f"#!/bin/sh\necho '{says}'\n")
    path.chmod(0o755)
    return path


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that is all of PATH but the shell's own."""
    monkeypatch.setenv("PATH", str(tmp_path))
    return tmp_path


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("redis-server", "Redis server v=6.2.0 sha=00000000:0 malloc=jemalloc-5.1.0 bits=64 build=1"),
        ("redis-server", "Redis server v=10.0.1 sha=00000000:0 malloc=jemalloc-5.1.0 bits=64 build=1"),
        ("valkey-server", "Valkey server v=8.1.3 sha=00000000:0 malloc=libc bits=64 build=1"),
    ],
)
def test_a_server_of_the_users_own_is_taken_if_it_is_new_enough(path: Path, name: str, says: str) -> None:
    own = place(path, name, says)
    assert server_binary() == own


@pytest.mark.parametrize(
    "says", ["Redis server v=6.0.16 sha=00000000:0", "Redis server v=5.3.9 sha=00000000:0", "what?", ""]
)
def test_one_that_is_too_old_or_says_nothing_is_not(path: Path, says: str) -> None:
    old = place(path, "redis-server", says)
    assert server_binary() != old
    assert os.access(server_binary(), os.X_OK)


def test_the_next_name_is_looked_at(path: Path) -> None:
    place(path, "redis-server", "Redis server v=6.0.16 sha=00000000:0")
    new = place(path, "valkey-server", "Valkey server v=8.1.3 sha=00000000:0")
    assert server_binary() == new


def test_one_that_cannot_be_run_is_not(path: Path) -> None:
    broken = path / "redis-server"
    broken.write_bytes(b"\x7fELF nonsense")
    broken.chmod(0o755)
    assert server_binary() != broken

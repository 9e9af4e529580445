"""`headrace status --watch`: in a pipe, as JSON, on a terminal, with a Redis that goes away."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import pytest

from headrace.bus import Bus, keys
from tests.redis.test_status import KEYS
from tests.support.bus_values import RUN, make_line, make_spec, start_run
from tests.support.commands import end_of, started
from tests.support.server import ValkeyServer
from tests.support.waiting import wait_until

pytestmark = pytest.mark.redis

_COLUMNS = "100"


class Watching:
    """A `headrace status --watch` that runs, and what it has said until now."""

    def __init__(self, folder: Path, url: str, *arguments: str, stdout: int | IO[bytes] | None = None) -> None:
        self._out, self._err = folder / "out", folder / "err"
        clean = {name: value for name, value in os.environ.items() if not name.startswith("HEADRACE_")}
        code = "from headrace_cli.main import run; run()"
        with self._out.open("wb") as out, self._err.open("wb") as err:
            self.process = subprocess.Popen(
                [sys.executable, "-c", code, "status", *arguments, "--watch"],
                env={**clean, "HEADRACE_REDIS_URL": url, "TERM": "xterm", "COLUMNS": _COLUMNS},
                stdin=subprocess.DEVNULL,
                stdout=out if stdout is None else stdout,
                stderr=err,
            )

    @property
    def lines(self) -> list[str]:
        return self._out.read_text().splitlines()

    @property
    def complaints(self) -> str:
        return self._err.read_text()

    def wait_for(self, words: str) -> None:
        wait_until(lambda: any(words in line for line in self.lines), what=f"{words!r} in {self.lines}")

    def interrupt(self) -> int:
        self.process.send_signal(signal.SIGINT)
        return self.process.wait(20)


@contextmanager
def watching(folder: Path, url: str, *arguments: str, stdout: int | None = None) -> Iterator[Watching]:
    watched = Watching(folder, url, *arguments, stdout=stdout)
    try:
        yield watched
    finally:
        if watched.process.poll() is None:
            watched.process.kill()
        watched.process.wait(20)


@pytest.mark.parametrize("options", [(), (RUN,)])
def test_who_watches_lines_reads_no_burnt_attempts(
    bus: Bus, redis_url: str, tmp_path: Path, options: tuple[str, ...]
) -> None:
    start_run(bus)
    bus.redis.config_resetstat()
    with watching(tmp_path, redis_url, *options) as watched:
        watched.wait_for("active")
    assert "cmdstat_xrevrange" not in bus.redis.info("commandstats")


def test_in_a_pipe_a_watched_run_is_a_line_for_each_change_until_it_ends(
    bus: Bus, redis_url: str, tmp_path: Path
) -> None:
    start_run(bus)
    with watching(tmp_path, redis_url, RUN) as watched:
        watched.wait_for("run run1 is active · stored 0 / 5")
        bus.runs.pause(RUN, "by hand")
        watched.wait_for("is paused: by hand")
        bus.runs.mark_done(RUN, [*(make_line(ordinal) for ordinal in range(4)), make_line(4, "failed", "timeout")])
        assert watched.process.wait(20) == 0
    assert watched.lines[-1].startswith("run run1 is finished · stored 4 / 5")
    assert "(failed: timeout 1)" in watched.lines[-1]
    assert len(set(watched.lines)) == len(watched.lines), "nothing is said twice"
    assert "\x1b" not in "".join(watched.lines)
    assert watched.complaints == ""


def test_a_watched_run_that_ends_with_open_samples_is_6(bus: Bus, redis_url: str, tmp_path: Path) -> None:
    start_run(bus)
    with watching(tmp_path, redis_url, RUN) as watched:
        watched.wait_for("active")
        bus.runs.cancel(RUN)
        assert watched.process.wait(20) == 6
    assert "cancelled with 5 samples open" in watched.complaints


@pytest.mark.parametrize("options", [(RUN,), ("--json",)])
def test_ctrl_c_ends_watching_with_0_and_says_nothing(
    bus: Bus, redis_url: str, tmp_path: Path, options: tuple[str, ...]
) -> None:
    start_run(bus)
    with watching(tmp_path, redis_url, *options) as watched:
        watched.wait_for(RUN)
        assert watched.interrupt() == 0
    assert watched.complaints == ""


def test_all_runs_are_watched_those_that_come_too(bus: Bus, redis_url: str, tmp_path: Path) -> None:
    with watching(tmp_path, redis_url) as watched:
        watched.wait_for("No runs")
        start_run(bus)
        watched.wait_for("run run1 is active")
        bus.runs.create(make_spec(run="newer"))
        bus.redis.hset(keys.run("newer"), "spec", make_spec(run="newer", schema=9).encode())
        watched.wait_for("upgrade headrace")
        bus.runs.cancel(RUN)
        watched.wait_for("run run1 is cancelled")
        assert watched.interrupt() == 0


def test_watched_as_json_each_line_is_a_look_and_the_last_one_the_end(bus: Bus, redis_url: str, tmp_path: Path) -> None:
    start_run(bus)
    with watching(tmp_path, redis_url, RUN, "--json") as watched:
        wait_until(lambda: len(watched.lines) >= 2, what="two looks")
        bus.runs.mark_done(RUN, [make_line(ordinal) for ordinal in range(5)])
        assert watched.process.wait(20) == 0
    looks = [json.loads(line) for line in watched.lines]
    assert [list(look) for look in looks] == [KEYS] * len(looks)
    assert [look["state"] for look in looks[:-1]] == ["active"] * (len(looks) - 1)
    assert looks[-1]["state"] == "finished"


@pytest.mark.parametrize("as_json", [False, True])
def test_a_redis_that_goes_away_is_named_and_waited_for(tmp_path: Path, as_json: bool) -> None:
    with ValkeyServer(tmp_path / "redis", aof=True) as server:
        bus = Bus.open(server.url)
        start_run(bus)
        with watching(tmp_path, server.url, RUN, *(["--json"] if as_json else [])) as watched:
            watched.wait_for(RUN)
            server.stop()
            wait_until(lambda: "Redis is away" in "".join(watched.lines) + watched.complaints, what="the complaint")
            server.start()
            bus.runs.mark_done(RUN, [make_line(ordinal) for ordinal in range(5)])
            assert watched.process.wait(30) == 0
        bus.close()
    assert "finished" in watched.lines[-1]
    if as_json:
        assert all(list(json.loads(line)) == KEYS for line in watched.lines), "stdout is JSON alone"
    else:
        assert watched.complaints == ""


@pytest.mark.parametrize("as_json", [False, True])
def test_a_run_that_redis_lost_is_waited_for(bus: Bus, redis_url: str, tmp_path: Path, as_json: bool) -> None:
    start_run(bus)
    with watching(tmp_path, redis_url, RUN, *(["--json"] if as_json else [])) as watched:
        watched.wait_for(RUN)
        bus.redis.flushall()
        wait_until(lambda: "run1 is gone from Redis" in "".join(watched.lines) + watched.complaints, what="the notice")
        start_run(bus)
        bus.runs.mark_done(RUN, [make_line(ordinal) for ordinal in range(5)])
        assert watched.process.wait(20) == 0
    assert "finished" in watched.lines[-1]
    if as_json:
        assert all(list(json.loads(line)) == KEYS for line in watched.lines), "stdout is JSON alone"
    else:
        assert watched.complaints == ""


def test_a_run_that_does_not_come_back_is_2(bus: Bus, redis_url: str, tmp_path: Path) -> None:
    start_run(bus)
    bus.redis.config_resetstat()
    with (
        watching(tmp_path, redis_url, RUN) as watched,
        started("status", RUN, "--wait", HEADRACE_REDIS_URL=redis_url) as following,
    ):
        wait_until(lambda: looks(bus) > 6, what="looks of both")
        watched.wait_for("active")
        bus.redis.flushall()
        code, complaints = end_of(following)
        assert (code, complaints.count("\n")) == (2, 1)
        assert "no run 'run1' in Redis" in complaints
        assert watched.process.wait(20) == 2
    assert "no run 'run1' in Redis" in watched.complaints


def looks(bus: Bus) -> int:
    """How often a run was read since the server's statistics were reset."""
    calls = bus.redis.info("commandstats").get("cmdstat_hgetall", {}).get("calls", 0)
    return int(calls)


def read_all(terminal: int) -> str:
    """What was written to a terminal whose other side is closed everywhere."""
    said = b""
    while True:
        try:
            data = os.read(terminal, 65536)
        except OSError:  # a terminal without another side ends so
            return said.decode()
        if not data:
            return said.decode()
        said += data


@pytest.mark.parametrize("one", [True, False])
def test_on_a_terminal_a_table_is_drawn_in_its_place(bus: Bus, redis_url: str, tmp_path: Path, one: bool) -> None:
    start_run(bus, output="/data/" + "x" * 150)  # longer than a line
    bus.runs.pause(RUN, "a\x1b[31m\x07b")
    terminal, other = pty.openpty()
    with watching(tmp_path, redis_url, *([RUN] if one else []), stdout=other) as watched:
        os.close(other)
        said = os.read(terminal, 1 << 20).decode()
        while "paused" not in said:
            said += os.read(terminal, 1 << 20).decode()
        if one:
            bus.runs.mark_done(RUN, [make_line(ordinal) for ordinal in range(5)])
            assert watched.process.wait(20) == 0
        else:
            assert watched.interrupt() == 0
        said += read_all(terminal)
    os.close(terminal)
    assert "a[31mb" in said, "what others wrote commands no terminal"
    assert "\x07" not in said
    assert ("finished" in said) == one
    plain = [line for line in said.split("\r\n") if "xxx" in line]
    assert plain and all(line.count("x") <= int(_COLUMNS) for line in plain), "folded, so that its height is known"
    assert "\x1b[?25h" in said, "the cursor is shown again"
    assert watched.complaints == ""

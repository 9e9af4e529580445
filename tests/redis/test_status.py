"""`headrace status` as JSON, and watched: in a pipe, on a terminal, with a Redis that goes away."""

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
from headrace.ids import RequestId
from headrace_cli.status import Report
from tests.support.bus_values import (
    IDENTITY,
    RUN,
    capture,
    claim,
    make_attempt,
    make_line,
    make_spec,
    start_run,
)
from tests.support.commands import assert_one_line, headrace
from tests.support.server import ValkeyServer
from tests.support.waiting import wait_until

pytestmark = pytest.mark.redis

PAUSED = {
    "run": RUN,
    "state": "paused",
    "reason": "a [reason]\x1b[31m",
    "waiting_for": "an engine",
    "total": 5,
    "stored": 1,
    "rejected": 1,
    "failed": 1,
    "open": 2,
    "pending": 1,
    "in_flight": 0,
    "tokens": 5,
    "bytes": 7,
    "verdicts": 2,
    "mismatches": 1,
    "mismatch_rate": 0.5,
    "reasons": {"token_content": 1},
    "rejected_by": {"too_long": 1},
    "failed_by": {"token_content": 1},
    "rate": None,
    "created_at": "",
    "finished_at": None,
    "output": "/data/out",
    "boundaries": [2, 4, 6],
    "final_state": "pre_norm",
    "format": "headrace",
    "engine": IDENTITY.engine,
    "weight_version": IDENTITY.weight_version,
    "dead": [],
}
KEYS = list(PAUSED)
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


def fail(bus: Bus, ordinal: int, reason: str) -> RequestId:
    (request,) = claim(bus, make_attempt(ordinal))
    bus.requests.end(request, burn=True, kind="mismatch", reason=reason)
    return request


# ---- JSON


def test_a_run_is_one_json_object_with_keys_that_stay(bus: Bus, redis_url: str) -> None:
    start_run(bus, max_attempts=1)
    request = fail(bus, 3, "token_content")
    (proven,) = claim(bus, make_attempt(2))
    capture(bus, proven)
    bus.runs.mark_done(
        RUN, [make_line(0), make_line(3, "failed", "token_content", str(request)), make_line(4, "rejected", "too_long")]
    )
    bus.runs.pause(RUN, "a [reason]\x1b[31m")
    bus.runs.say_waiting(RUN, "an engine")
    shown = headrace("status", RUN, "--json", HEADRACE_REDIS_URL=redis_url, COLUMNS="20")
    assert (shown.returncode, shown.stderr, shown.stdout.count("\n")) == (0, "", 1)
    table = json.loads(shown.stdout)
    letter = {"request": str(request), "ordinal": 3, "attempt": 1, "reason": "token_content"}
    assert list(table) == KEYS
    assert table == PAUSED | {"created_at": table["created_at"], "dead": [letter]}


def test_the_rate_is_that_since_the_older_note_by_the_clock_of_redis(bus: Bus) -> None:
    start_run(bus)
    bus.runs.mark_rate(RUN)
    bus.runs.mark_done(RUN, [make_line(0), make_line(1)])
    view = bus.runs.get(RUN)
    assert view is not None
    table = Report(view=view, dead=[], now=view.rate_since + 4).to_json()
    assert table["rate"] == {"rows_per_second": 0.5, "tokens_per_second": 2.5, "seconds_left": 6.0}
    assert (table["engine"], table["mismatch_rate"]) == (None, 0.0)
    assert Report(view=view, dead=[], now=view.rate_since).to_json()["rate"] is None


def test_all_runs_are_a_list_also_when_there_is_none(bus: Bus, redis_url: str) -> None:
    assert headrace("status", "--json", HEADRACE_REDIS_URL=redis_url).stdout == "[]\n"
    start_run(bus)
    bus.runs.create(make_spec(run="newer"))
    bus.redis.hset(keys.run("newer"), "spec", make_spec(run="newer", schema=9).encode())
    shown = headrace("status", "--json", HEADRACE_REDIS_URL=redis_url)
    assert_one_line(shown, 1, "run 'newer'", "upgrade headrace")
    assert [table["run"] for table in json.loads(shown.stdout)] == [RUN]


def test_json_while_waiting_leaves_stdout_to_the_json(bus: Bus, redis_url: str) -> None:
    start_run(bus)
    bus.runs.mark_done(RUN, [make_line(ordinal) for ordinal in range(5)])
    shown = headrace("status", RUN, "--wait", "--json", HEADRACE_REDIS_URL=redis_url)
    assert shown.returncode == 0
    table = json.loads(shown.stdout)
    assert (table["state"], table["open"]) == ("finished", 0)
    assert table["created_at"] <= table["finished_at"]


def test_the_last_dead_letters_are_shown_when_samples_failed(bus: Bus, redis_url: str) -> None:
    start_run(bus, max_attempts=1, total=7, fed=7)
    requests = [fail(bus, ordinal, f"why{ordinal}") for ordinal in range(7)]
    assert "dead letters" not in headrace("status", RUN, HEADRACE_REDIS_URL=redis_url).stdout
    bus.runs.mark_done(RUN, [make_line(0, "failed", "why0", str(requests[0]))])
    shown = headrace("status", RUN, HEADRACE_REDIS_URL=redis_url, COLUMNS="200").stdout
    for ordinal, request in enumerate(requests):
        assert (f"why{ordinal}: attempt 1, {request}" in shown) == (ordinal >= 2)


@pytest.mark.parametrize("options", [("--wait",), (RUN, "--wait", "--watch")])
def test_options_that_do_not_go_together_are_refused(bus: Bus, redis_url: str, options: tuple[str, ...]) -> None:
    start_run(bus)
    assert_one_line(headrace("status", *options, HEADRACE_REDIS_URL=redis_url), 2, "--wait")


@pytest.mark.parametrize("options", [(), ("--watch", "--json")])
def test_a_run_that_redis_does_not_know_is_a_usage_error(bus: Bus, redis_url: str, options: tuple[str, ...]) -> None:
    start_run(bus)
    shown = headrace("status", "other", *options, HEADRACE_REDIS_URL=redis_url)
    assert_one_line(shown, 2, "'other'", RUN)
    assert shown.stdout == ""


# ---- watched


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

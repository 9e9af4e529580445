"""The commands over a real Redis: what they say, and with which code they end."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from headrace.bus import Bus, keys
from headrace.bus.values import DESTINATION_FULL
from headrace.errors import Conflict
from headrace_cli.follow import follow
from tests.support.bus_values import RUN, make_line, make_site, make_spec, start_run
from tests.support.commands import assert_one_line, headrace, started
from tests.support.waiting import wait_until

pytestmark = pytest.mark.redis


@contextmanager
def following(bus: Bus) -> Iterator[list[str]]:
    """Follow the run in a thread; gives the states it ended with, or the error's text."""
    ended: list[str] = []

    def run() -> None:
        try:
            ended.append(follow(bus, RUN).state)
        except Conflict as error:
            ended.append(str(error))

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield ended
    finally:
        bus.runs.cancel(RUN)
        thread.join(20)
        assert not thread.is_alive()


def test_a_run_that_is_paused_by_a_fault_is_followed_no_longer(bus: Bus) -> None:
    start_run(bus)
    with following(bus) as ended:
        bus.runs.pause(RUN, "/data/out is damaged")
        wait_until(lambda: ended, what="the end of following")
    assert ended == ["run 'run1' is paused: /data/out is damaged; go on with: headrace resume run1"]


def test_a_run_that_waits_for_room_is_followed_on(bus: Bus) -> None:
    start_run(bus)
    with following(bus) as ended:
        bus.runs.pause(RUN, DESTINATION_FULL)
        bus.runs.activate(RUN)
        bus.runs.mark_done(RUN, [make_line(ordinal) for ordinal in range(5)])
        wait_until(lambda: ended, what="the end of following")
    assert ended == ["finished"]


def test_waiting_for_a_paused_run_ends_with_4_and_how_to_go_on(bus: Bus, redis_url: str) -> None:
    start_run(bus)
    bus.runs.pause(RUN, "by hand")
    waited = headrace("status", RUN, "--wait", HEADRACE_REDIS_URL=redis_url)
    assert_one_line(waited, 4, "paused: by hand", "headrace resume run1")
    assert headrace("status", RUN, HEADRACE_REDIS_URL=redis_url).returncode == 0


def test_a_finished_run_with_failed_samples_is_0_with_the_counts(bus: Bus, redis_url: str) -> None:
    start_run(bus)
    lines = [make_line(ordinal) for ordinal in range(4)] + [make_line(4, "failed", "timeout")]
    bus.runs.mark_done(RUN, lines)
    status = headrace("status", RUN, "--wait", HEADRACE_REDIS_URL=redis_url)
    assert status.returncode == 0
    assert "stored 4 / 5" in status.stdout
    assert "timeout 1" in status.stdout


def test_a_run_that_redis_lost_is_followed_on(bus: Bus) -> None:
    spec = start_run(bus)
    with following(bus) as ended:
        bus.redis.config_resetstat()
        wait_until(lambda: "cmdstat_hgetall" in bus.redis.info("commandstats"), what="a look")
        bus.redis.flushall()
        bus.redis.config_resetstat()
        # Its names are listed for the one that is not there.
        wait_until(lambda: "cmdstat_evalsha" in bus.redis.info("commandstats"), what="a look that finds nothing")
        assert start_run(bus) == spec
        bus.runs.mark_done(RUN, [make_line(ordinal) for ordinal in range(5)])
        wait_until(lambda: ended, what="the end of following")
    assert ended == ["finished"]


@pytest.mark.parametrize("reason", ["[/bold] x", "[red]x[/red]", "[link=http://x]x", ":warning: x", "[", "\\[x]"])
def test_what_others_wrote_is_shown_as_it_is(bus: Bus, redis_url: str, reason: str) -> None:
    start_run(bus, output=f"/data/{reason}")
    paused = headrace("pause", RUN, "--reason", reason, HEADRACE_REDIS_URL=redis_url)
    assert (paused.returncode, paused.stderr) == (0, "")
    for command in (("status", RUN), ("list",)):
        shown = headrace(*command, HEADRACE_REDIS_URL=redis_url, COLUMNS="200")
        assert (shown.returncode, shown.stderr) == (0, "")
        assert f"paused: {reason}" in shown.stdout
        assert f"/data/{reason}" in shown.stdout
    assert_one_line(headrace("status", RUN, "--wait", HEADRACE_REDIS_URL=redis_url), 4, f"is paused: {reason};")
    doctor = headrace("doctor", HEADRACE_REDIS_URL=redis_url)
    assert "Traceback" not in doctor.stderr


def test_doctor_shows_a_site_as_it_calls_itself(bus: Bus, redis_url: str) -> None:
    bus.sites.register(make_site(model="[/bold]:x:\x1b[31m"), 60)
    doctor = headrace("doctor", HEADRACE_REDIS_URL=redis_url)
    assert doctor.returncode == 3
    assert "[/bold]:x:[31m, boundaries" in doctor.stdout
    assert "ok   Redis at" in doctor.stdout


@pytest.mark.parametrize("command", [("status", RUN), ("list",), ("status", RUN, "--wait"), ("status", "--watch")])
def test_words_of_others_forge_no_line_and_fill_no_screen(bus: Bus, redis_url: str, command: tuple[str, ...]) -> None:
    forged = f"run {RUN} is finished · stored 5 / 5"
    start_run(bus)
    bus.runs.pause(RUN, f"\u202eforget it\n{forged}\u2028{forged}{'x' * 100_000}")
    bus.runs.say_waiting(RUN, f"nothing\n{forged}{'x' * 100_000}")
    # Of watching without end the first line.
    with started(*command, HEADRACE_REDIS_URL=redis_url, COLUMNS="2000") as looking:
        assert looking.stdout is not None
        said = looking.stdout.readline() if "--watch" in command else b"".join(looking.communicate(timeout=30))
    lines = said.decode().splitlines()
    assert not [line for line in lines if line.startswith(forged)], lines
    assert any(f"\ufffdforget it\\n{forged}" in line for line in lines)
    assert sum(len(line.strip()) for line in lines) < 3000


@pytest.mark.parametrize("reason", ["\udcff\udcfe", "x" * 501])
def test_a_reason_that_cannot_be_kept_is_refused(bus: Bus, redis_url: str, reason: str) -> None:
    start_run(bus)
    assert_one_line(headrace("pause", RUN, "--reason", reason, HEADRACE_REDIS_URL=redis_url), 2, "--reason")
    view = bus.runs.get(RUN)
    assert view is not None
    assert view.state == "active"


@pytest.mark.parametrize("command", ["status", "pause", "resume", "cancel"])
def test_a_name_that_no_run_has_is_refused(bus: Bus, redis_url: str, command: str) -> None:
    assert_one_line(headrace(command, "\udcff\n", HEADRACE_REDIS_URL=redis_url), 2, "run name")


def test_no_command_writes_a_control_character(bus: Bus, redis_url: str) -> None:
    start_run(bus)
    bus.runs.pause(RUN, "a\x1b[31m\x07\x9b2Jb\rc")
    for command in (("status", RUN), ("list",), ("status", RUN, "--wait")):
        result = headrace(*command, HEADRACE_REDIS_URL=redis_url)
        said = result.stdout + result.stderr
        assert "a[31m2Jbc" in said
        assert said.replace("\n", "").isprintable(), said


def test_a_run_that_this_version_cannot_read_hides_no_other(bus: Bus, redis_url: str) -> None:
    start_run(bus)
    bus.runs.create(make_spec(run="newer"))
    bus.redis.hset(keys.run("newer"), "spec", make_spec(run="newer", schema=9).encode())
    listed = headrace("list", HEADRACE_REDIS_URL=redis_url)
    assert_one_line(listed, 1, "run 'newer'", "upgrade headrace")
    assert "run1" in listed.stdout

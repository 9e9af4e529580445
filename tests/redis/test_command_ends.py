"""How a command ends when its output is taken by nobody, cannot spell a character, or somebody presses Ctrl-C."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from headrace.bus import Bus
from tests.support.bus_values import RUN, make_line, start_run
from tests.support.commands import CLI, assert_one_line, end_of, headrace, started
from tests.support.waiting import wait_until

pytestmark = pytest.mark.redis

# Ctrl-C at the very moment at which a module is looked for.
_INTERRUPTED_IMPORT = """
import os, signal, sys
class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == {module!r}:
            os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, Finder())
"""
LOOKS = [("status",), ("status", RUN), ("status", RUN, "--json"), ("status", RUN, "--watch"), ("list",), ("--help",)]


@pytest.mark.parametrize("arguments", LOOKS, ids=" ".join)
def test_a_full_output_is_3_and_one_line(bus: Bus, redis_url: str, arguments: tuple[str, ...]) -> None:
    start_run(bus)
    with (
        Path("/dev/full").open("wb") as full,
        started(*arguments, stdout=full, HEADRACE_REDIS_URL=redis_url) as looking,
    ):
        code, complaints = end_of(looking)
    assert (code, complaints.count("\n")) == (3, 1), complaints
    assert "headrace: standard output takes no more: No space left on device" in complaints


@pytest.mark.parametrize("arguments", LOOKS, ids=" ".join)
def test_an_output_that_nobody_reads_ends_a_command_in_silence(
    bus: Bus, redis_url: str, arguments: tuple[str, ...]
) -> None:
    start_run(bus)
    reader, writer = os.pipe()
    os.close(reader)
    with started(*arguments, stdout=writer, HEADRACE_REDIS_URL=redis_url) as looking:
        os.close(writer)
        assert end_of(looking) == (141, "")


def test_an_error_that_nobody_reads_keeps_its_code(redis_url: str) -> None:
    with Path("/dev/full").open("wb") as full:
        command = [sys.executable, "-c", CLI, "status", "other"]
        environ = {**os.environ, "HEADRACE_REDIS_URL": redis_url}
        done = subprocess.run(command, env=environ, stderr=full, stdout=subprocess.PIPE, timeout=30, check=False)
    assert (done.returncode, done.stdout) == (2, b"")


@pytest.mark.parametrize("arguments", LOOKS[:3], ids=" ".join)
def test_a_character_that_the_output_cannot_spell_is_replaced(
    bus: Bus, redis_url: str, arguments: tuple[str, ...]
) -> None:
    start_run(bus, output="/data/ä")
    bus.runs.pause(RUN, "voilà 漢")
    shown = headrace(*arguments, HEADRACE_REDIS_URL=redis_url, PYTHONIOENCODING="ascii", COLUMNS="200")
    assert (shown.returncode, shown.stderr) == (0, "")
    if "--json" in arguments:
        assert json.loads(shown.stdout)["reason"] == "voilà 漢"
    else:
        assert "paused: voil? ?" in shown.stdout
        assert "/data/?" in shown.stdout


def test_progress_and_errors_are_ascii_where_they_must_be(bus: Bus, redis_url: str) -> None:
    start_run(bus)
    bus.runs.pause(RUN, "voilà")
    waited = headrace("status", RUN, "--wait", HEADRACE_REDIS_URL=redis_url, PYTHONIOENCODING="ascii")
    assert_one_line(waited, 4, "paused: voil?;")


@pytest.mark.parametrize("module", ["headrace_cli.commands", "typer", "rich.live", "redis"])
@pytest.mark.parametrize(
    ("arguments", "code"), [(("status", "--watch"), 0), (("status",), 130), (("resume", RUN), 130)]
)
def test_ctrl_c_while_modules_are_imported_ends_a_command_in_silence(
    module: str, arguments: tuple[str, ...], code: int
) -> None:
    with started(*arguments, code=_INTERRUPTED_IMPORT.format(module=module) + CLI) as starting:
        assert end_of(starting) == (code, "")


@pytest.mark.parametrize(
    ("arguments", "code"), [(("status", "--watch"), 0), (("status",), 130), (("resume", RUN), 130)]
)
def test_ctrl_c_while_redis_is_slow_to_answer_ends_a_command_in_silence(arguments: tuple[str, ...], code: int) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        url = f"redis://127.0.0.1:{server.getsockname()[1]}/0"
        server.settimeout(20)
        with started(*arguments, HEADRACE_REDIS_URL=url) as connecting:
            connection, _ = server.accept()
            with connection:
                connecting.send_signal(signal.SIGINT)
                assert end_of(connecting) == (code, "")


def test_ctrl_c_while_a_run_is_followed_is_130_and_the_run_goes_on(bus: Bus, redis_url: str) -> None:
    start_run(bus)
    bus.redis.config_resetstat()
    with started("status", RUN, "--wait", HEADRACE_REDIS_URL=redis_url) as following:
        wait_until(lambda: bus.redis.info("commandstats").get("cmdstat_hgetall", {}).get("calls", 0) > 2, what="looks")
        following.send_signal(signal.SIGINT)
        assert end_of(following) == (130, "")
    view = bus.runs.get(RUN)
    assert view is not None
    assert view.state == "active"


def test_who_has_ctrl_c_ignored_is_not_ended_by_it(bus: Bus, redis_url: str) -> None:
    start_run(bus)
    ignoring = "import signal; signal.signal(signal.SIGINT, signal.SIG_IGN)\n" + CLI
    bus.redis.config_resetstat()
    with started("status", RUN, "--watch", code=ignoring, HEADRACE_REDIS_URL=redis_url) as watching:
        wait_until(lambda: "cmdstat_hgetall" in bus.redis.info("commandstats"), what="a look")
        watching.send_signal(signal.SIGINT)
        bus.runs.mark_done(RUN, [make_line(ordinal) for ordinal in range(5)])
        assert end_of(watching) == (0, "")

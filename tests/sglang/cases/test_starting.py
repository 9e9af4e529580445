"""What the plugin does when it starts: nothing, its work, or a word about what is in the way."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from dataclasses import replace

from headrace.dumpfolder import read_problem
from headrace.dumps import ENGINE_FILE, PROBLEM_FILE
from tests.sglang.cases.asking import Client, Prompts
from tests.sglang.cases.provoking import HIDE
from tests.sglang.cases.rig import CHUNK, CONTEXT, MAIN, VOCAB, Rig
from tests.sglang.server import Servers, SglangServer
from tests.support.waiting import wait_until

SEAM = "sglang.srt.managers.scheduler.Scheduler.abort_request"


def assert_it_serves(server: SglangServer) -> None:
    """It answers, ids of ours too, and captures nothing."""
    client, prompts = Client(server.url), Prompts(VOCAB, "serves")
    for tokens in (1, CHUNK, 3 * CHUNK):
        assert len(client.capture(prompts.new(tokens), 3).json()["output_ids"]) == 3
    client.abort(everything=True)
    client.close()
    assert list(server.dump_dir.glob("*hr-*")) == []
    assert not (server.dump_dir / ENGINE_FILE).exists()


def test_without_a_dump_folder_nothing_happens(servers: Servers) -> None:
    with servers.alone(MAIN, HEADRACE_DUMP_DIR="") as server:
        assert_it_serves(server)
        assert not server.dump_dir.exists()
        log = server.log.read_text()
    assert "Failed to" not in log  # load or execute a plugin
    assert "headrace captures" not in log


def test_a_seam_that_is_missing_is_named_and_the_server_serves(servers: Servers) -> None:
    with servers.alone(MAIN, **{HIDE: SEAM}) as server:
        assert_it_serves(server)
        problem = read_problem(server.dump_dir / PROBLEM_FILE)
        assert SEAM.rpartition(".")[2] in problem.problem
        log = server.log.read_text()
    assert [line for line in log.splitlines() if "headrace" in line and SEAM.rpartition(".")[2] in line]


def test_a_flag_that_capture_cannot_live_with_is_named_and_the_server_serves(servers: Servers) -> None:
    with servers.alone(replace(MAIN, flags=(*MAIN.flags, "--allow-auto-truncate"))) as server:
        assert_it_serves(server)
        problem = read_problem(server.dump_dir / PROBLEM_FILE)
        assert "allow-auto-truncate" in problem.problem
        truncated = Client(server.url).generate(Prompts(VOCAB, "long").ids(CONTEXT + 9), None)
        assert truncated.status_code == 200


def test_a_killed_server_starts_as_another_boot_and_sweeps(
    servers: Servers, make_rig: Callable[[SglangServer], Rig]
) -> None:
    with servers.alone(MAIN) as server:
        rig = make_rig(server)
        whole, half = rig.prompts.new(2 * CHUNK), rig.prompts.new(20 * CHUNK)
        assert rig.client.capture(whole).status_code == 200
        rig.folder.wait_published(whole.rid)
        boot = rig.folder.card.boot
        rig.client.slow_down(0.15)
        rig.client.begin_capture(half)
        rig.folder.wait_half(half.rid)
        os.killpg(server.pid, signal.SIGKILL)
        wait_until(lambda: not server.alive, what="the server to be gone")
        server.stop()
        assert rig.folder.is_half(half.rid)

        rig = make_rig(server.start())
        assert rig.folder.card.boot != boot
        assert [path.name for path in rig.folder.path.iterdir() if boot in path.name] == []
        assert rig.folder.left() == [rig.folder.dump_path(whole.rid).name]
        rig.take(whole)
        rig.capture(rig.prompts.of(half.ids))

"""A dump folder that is full, cannot be written or is gone: the engine goes on, counts, grows in nothing, recovers."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from headrace.dumps import ENGINE_FILE
from headrace.reasons import Reason
from tests.sglang.cases.rig import CHUNK, MAIN, Rig
from tests.sglang.cases.unharmed import Unharmed
from tests.sglang.server import Servers, SglangServer
from tests.support.filesystems import fill, small_tmpfs
from tests.support.waiting import wait_until

KIB = 4 * 1024


@pytest.fixture(scope="module")
def small(servers: Servers) -> Iterator[SglangServer]:
    """A server whose dump folder is a small tmpfs of its own; skips where none can be mounted."""
    servers.close()
    environment, model = servers.environment(MAIN.version), servers.checkpoint(MAIN.model)
    server = SglangServer(replace(MAIN, environ=(("OF_ITS_OWN", "tmpfs"),)), environment, model, servers.logs)
    try:
        with small_tmpfs(server.dump_dir, KIB):
            yield server.start()
            server.stop()
    finally:
        server.close()


@pytest.fixture
def rig(small: SglangServer, make_rig: Callable[[SglangServer], Rig]) -> Iterator[Rig]:
    """A rig around that server."""
    small.settle()
    made = make_rig(small)
    yield made
    made.assert_nothing_left()
    made.client.close()


@contextmanager
def immutable(place: Path) -> Iterator[None]:
    """A folder in which nobody, root neither, can make, rename or remove a file."""
    if shutil.which("chattr") is None or subprocess.run(["chattr", "+i", place], check=False).returncode:
        pytest.skip("making a folder immutable needs root")
    try:
        yield
    finally:
        subprocess.run(["chattr", "-i", place], check=True)


def test_a_folder_without_any_room(rig: Rig) -> None:
    engine = Unharmed(rig)
    filler = fill(rig.folder.path)
    lost = engine.capture(30)
    engine.assert_steady()
    filler.unlink()
    engine.assert_lost(lost, {Reason.NO_ROOM})
    engine.assert_recovers()
    engine.assert_unharmed()


def test_a_folder_that_fills_because_nobody_takes_the_dumps_away(rig: Rig) -> None:
    engine = Unharmed(rig)
    prompts = engine.capture(60)
    engine.assert_steady()
    whole = [prompt for prompt in prompts if rig.folder.dump_path(prompt.rid).exists()]
    lost = [prompt for prompt in prompts if prompt not in whole]
    assert len(whole) > 10
    assert len(lost) > 10
    for prompt in whole:
        rig.take(prompt)
    engine.assert_lost(lost, {Reason.NO_ROOM}, published=len(whole))
    engine.assert_recovers()
    engine.assert_unharmed()


def test_a_folder_that_fills_in_the_middle_of_a_prompt(rig: Rig) -> None:
    """Its room was promised, and somebody else took it."""
    engine, prompt = Unharmed(rig), rig.prompts.new(8 * CHUNK)
    with rig.client.slowed():
        answer = rig.client.begin_capture(prompt)
        rig.folder.wait_half(prompt.rid)
        filler = fill(rig.folder.path)
    assert answer.result().status_code == 200
    wait_until(lambda: not rig.folder.is_half(prompt.rid), what="the hidden file to be gone")
    filler.unlink()
    engine.assert_lost([prompt], {Reason.NO_ROOM})
    engine.assert_recovers()
    engine.assert_unharmed()


def test_a_folder_that_cannot_be_written(rig: Rig) -> None:
    engine = Unharmed(rig)
    with immutable(rig.folder.path):
        lost = engine.capture(30)
        engine.assert_steady()
    engine.assert_lost(lost, {Reason.INTERNAL})
    engine.assert_recovers()
    engine.assert_unharmed()


def test_a_folder_that_cannot_be_written_in_the_middle_of_a_prompt(rig: Rig) -> None:
    engine, prompt = Unharmed(rig), rig.prompts.new(5 * CHUNK)
    with rig.client.slowed():
        answer = rig.client.begin_capture(prompt)
        rig.folder.wait_half(prompt.rid)
        with immutable(rig.folder.path):
            assert answer.result().status_code == 200
            engine.assert_steady()
    engine.assert_lost([prompt], {Reason.INTERNAL})
    engine.assert_recovers()
    engine.assert_unharmed()


def test_a_folder_that_is_replaced(servers: Servers, make_rig: Callable[[SglangServer], Rig]) -> None:
    """Whoever cleans up takes it away, files of the engine's own with it; the engine goes on in the next one."""
    with servers.alone(MAIN) as server:
        rig = make_rig(server)
        engine = Unharmed(rig)
        prompt = rig.prompts.new(8 * CHUNK)
        boot = rig.folder.card.boot
        with rig.client.slowed():
            answer = rig.client.begin_capture(prompt)
            rig.folder.wait_half(prompt.rid)
            shutil.rmtree(rig.folder.path)
        assert answer.result().status_code == 200
        lost = engine.capture(30)
        engine.assert_steady()
        rig.folder.path.mkdir(exist_ok=True)
        wait_until((rig.folder.path / ENGINE_FILE).exists, what="the card in the new folder")
        assert rig.folder.card.boot == boot
        engine.assert_lost([prompt, *lost], {Reason.INTERNAL})
        engine.assert_recovers()
        engine.assert_unharmed()
        rig.assert_nothing_left()

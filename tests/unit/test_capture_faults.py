from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from headrace.dumpfolder import read_card
from headrace.errors import UsageError
from headrace_capture import publisher
from headrace_capture.core import Capture
from headrace_capture.folder import Folder
from headrace_capture.rows import RowShape
from headrace_capture.stats import Accumulator
from tests.support.capture import (
    assert_published,
    dump_path,
    forward_of,
    leftovers,
    lost,
    prompt,
    start_capture,
)
from tests.support.filesystems import fill, small_tmpfs
from tests.support.waiting import wait_until

ROOT = Path(__file__).parents[2]


class FaultyFolder(Folder):
    """A dump folder on a filesystem that can be made to fail or to hang."""

    def __init__(self, path: Path, boot: str) -> None:
        self.raises: Callable[[], BaseException] | None = None
        self.answers = threading.Event()
        self.answers.set()
        self.asked = 0
        super().__init__(path, boot)

    def free_bytes(self) -> int:
        self.asked += 1
        assert self.answers.wait(60)
        return super().free_bytes()

    def create(self, name: str) -> int:
        assert self.answers.wait(60)
        if self.raises is not None:
            raise self.raises()
        return super().create(name)


def faulty_capture(folder: Path, **options: float) -> tuple[Capture, FaultyFolder]:
    made: list[FaultyFolder] = []

    def open_folder(path: Path, boot: str) -> FaultyFolder:
        made.append(FaultyFolder(path, boot))
        return made[-1]

    return start_capture(folder, open_folder=open_folder, **options), made[0]  # type: ignore[arg-type]


def assert_nothing_grew(capture: Capture) -> None:
    """Neither slots nor books, promises, jobs or descriptors are left of what was lost."""
    wait_until(lambda: capture.flush(1), what="the writers")
    publisher = capture._publisher
    assert (publisher._dumps, capture.counts().buffer_bytes, capture.counts().half_assembled) == ({}, 0, 0)
    assert capture._room._promised == 0
    assert [writer.load for writer in publisher._writers] == [(0, 0)] * len(publisher._writers)
    assert len(publisher._notices) <= 4096


def open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def assert_recovers(capture: Capture, folder: Path) -> None:
    number = [10_000]

    def published() -> bool:
        number[0] += 1
        one = prompt(9, ordinal=number[0])
        capture.forward(forward_of([(one, 0, 9)]))
        assert capture.flush(30)
        return dump_path(folder, one).exists()

    wait_until(published, what="a dump")
    assert_published(folder, prompt(9, ordinal=number[0]))


def test_a_half_written_file_that_cannot_be_removed_goes_when_it_can_be(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    capture, one = start_capture(folder), prompt(20)
    capture.forward(forward_of([(one, 0, 10)]))
    assert capture.flush(30)
    unlink = os.unlink

    def fail(name: str, *, dir_fd: int | None = None) -> None:
        if str(name).endswith(".part"):
            raise PermissionError(name)
        unlink(name, dir_fd=dir_fd)

    with monkeypatch.context() as patch:
        patch.setattr(os, "unlink", fail)
        capture.abort(one.rid)
        assert_nothing_grew(capture)
        assert lost(folder, one).reason == "aborted"
        assert leftovers(folder) == [f".{capture.boot}.{one.rid}.part"]
    wait_until(lambda: not leftovers(folder), what="the file to be gone")
    capture.close(10)


@pytest.mark.parametrize("error", [RuntimeError, MemoryError, PermissionError, SystemExit])
def test_writers_that_raise_cost_each_request_once_and_the_engine_nothing(
    folder: Path, error: type[BaseException]
) -> None:
    capture, faulty = faulty_capture(folder)
    files = open_files()
    faulty.raises = error
    for ordinal in range(200):
        one = prompt(20, ordinal=ordinal)
        capture.forward(forward_of([(one, 0, 10)]))
        capture.forward(forward_of([(one, 10, 20)]))
    assert_nothing_grew(capture)
    counts = capture.counts()
    assert (counts.published, counts.lost) == (0, {"internal": 200})
    assert open_files() == files
    faulty.raises = None
    assert_recovers(capture, folder)
    capture.close(10)


def test_a_dump_that_cannot_be_opened_costs_its_request_alone(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    capture = start_capture(folder)
    prompts = [prompt(9, ordinal=ordinal) for ordinal in range(3)]
    made = iter([None, RuntimeError("provoked"), None])

    def accumulator(shape: RowShape) -> Accumulator:
        if (error := next(made)) is not None:
            raise error
        return Accumulator(shape)

    monkeypatch.setattr(publisher, "Accumulator", accumulator)
    dropped = capture.forward(forward_of([(one, 0, 9) for one in prompts]))
    assert dropped == {prompts[1].rid: "dropped:internal"}
    assert_nothing_grew(capture)
    assert "provoked" in lost(folder, prompts[1]).detail
    for one in (prompts[0], prompts[2]):
        assert_published(folder, one)
    capture.close(10)


def test_when_nobody_takes_dumps_away_later_requests_are_lost_at_once_until_somebody_does(tmp_path: Path) -> None:
    with small_tmpfs(tmp_path / "small", 512) as small:
        folder = small / "dumps"
        capture = start_capture(folder)
        files = open_files()
        for ordinal in range(300):
            capture.forward(forward_of([(prompt(100, ordinal=ordinal), 0, 100)]))
        assert_nothing_grew(capture)
        counts = capture.counts()
        assert counts.published >= 10 and counts.lost == {"no_room": 300 - counts.published}
        assert open_files() == files and leftovers(folder) == []
        for path in folder.glob("hr-*"):
            path.unlink()
        assert_recovers(capture, folder)
        capture.close(10)


def test_a_filesystem_that_others_fill_while_dumps_are_written_costs_requests_alone(tmp_path: Path) -> None:
    with small_tmpfs(tmp_path / "small", 1024) as small:
        folder = small / "dumps"
        capture = start_capture(folder)
        half = prompt(2000)
        capture.forward(forward_of([(half, 0, 10)]))
        assert capture.flush(30)
        filler = fill(small)
        capture.forward(forward_of([(half, 10, 2000)]))
        for ordinal in range(1, 50):
            capture.forward(forward_of([(prompt(100, ordinal=ordinal), 0, 100)]))
        assert_nothing_grew(capture)
        assert capture.counts().lost == {"no_room": 50} and leftovers(folder) == []
        filler.unlink()
        assert_recovers(capture, folder)
        capture.close(10)


def test_a_filesystem_that_hangs_costs_the_scheduler_one_wait(folder: Path) -> None:
    capture, faulty = faulty_capture(folder, buffer_bytes=1 << 15, max_wait_seconds=0.2)
    faulty.answers.clear()
    asked = faulty.asked
    wait_until(lambda: faulty.asked > asked, what="a question that hangs")
    forwards = 200
    for ordinal in range(forwards):
        capture.forward(forward_of([(prompt(30, ordinal=ordinal), 0, 30)]))
    stats = capture.stats()
    assert 200 <= stats.waited_ms < 200 * forwards / 10  # one wait of 200 ms, and nothing like one a forward
    assert stats.lost["no_room"] > forwards / 2
    assert stats.buffer_bytes <= 1 << 15
    faulty.answers.set()
    assert_nothing_grew(capture)
    counts = capture.counts()
    assert counts.published + sum(counts.lost.values()) == forwards
    assert_recovers(capture, folder)
    capture.close(10)


def test_all_batches_of_a_forward_share_one_wait(folder: Path) -> None:
    capture, faulty = faulty_capture(folder, buffer_bytes=1 << 14, max_wait_seconds=0.3, writers=1)
    faulty.answers.clear()
    capture.forward(forward_of([(prompt(60, ordinal=1), 0, 60)]))  # in slots that the writer holds
    before = capture.stats().waited_ms
    rows = [(prompt(30, ordinal=ordinal), 0, 30) for ordinal in range(10, 40)]
    began = time.monotonic()
    dropped = capture.forward(forward_of(rows))
    assert time.monotonic() - began < 30 * 0.3 / 2
    assert capture.stats().waited_ms - before < 30 * 300 / 2
    assert set(dropped.values()) == {"dropped:no_room"} and len(dropped) >= 20
    faulty.answers.set()
    assert_nothing_grew(capture)
    capture.close(10)


def test_closing_over_a_filesystem_that_hangs_ends_in_time_and_leaves_the_folder_to_the_threads(folder: Path) -> None:
    capture, faulty = faulty_capture(folder)
    faulty.answers.clear()
    one = prompt(30)
    capture.forward(forward_of([(one, 0, 30)]))
    began = time.monotonic()
    capture.close(0.2)
    assert time.monotonic() - began < 10
    faulty.answers.set()
    wait_until(lambda: dump_path(folder, one).exists(), what="the dump")
    assert_published(folder, one)
    faulty.close()


SCRIPT = """
import os, sys, time
from pathlib import Path
from tests.support.capture import *
folder = Path(sys.argv[1])
capture = start_capture(folder)
print(capture.boot, flush=True)
for ordinal in range(30):
    capture.forward(forward_of([(prompt(500, ordinal=ordinal), 0, 500)]))
capture.forward(forward_of([(prompt(500, ordinal=99), 0, 100)]))
"""


def run(folder: Path, end: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", SCRIPT + end, str(folder)]
    return subprocess.run(command, cwd=ROOT, check=False, timeout=120, capture_output=True, text=True)


def test_a_process_that_ends_without_closing_writes_what_is_queued(folder: Path) -> None:
    done = run(folder, "")
    told = f"requests were lost (aborted 1), the last one: {prompt(500, ordinal=99).rid}: the engine ended\n"
    assert (done.returncode, done.stderr) == (0, told)
    assert len(list(folder.glob("hr-*.safetensors"))) == 30
    assert lost(folder, prompt(500, ordinal=99)).reason == "aborted"
    assert not [path for path in folder.iterdir() if path.name.startswith(".")]


def test_a_process_that_fails_ends_with_its_own_error(folder: Path) -> None:
    done = run(folder, "raise ValueError('of its own')")
    assert done.returncode == 1 and "of its own" in done.stderr
    assert len(list(folder.glob("hr-*.safetensors"))) == 30


def test_a_process_whose_filesystem_hangs_ends_all_the_same(folder: Path) -> None:
    end = (
        "import headrace_capture.core as core, threading\n"
        "core._EXIT_SECONDS = 0.2\n"
        "for writer in capture._publisher._writers: writer.put(threading.Event().wait)\n"
        "capture.forward(forward_of([(prompt(500, ordinal=98), 0, 500)]))\n"
    )
    assert run(folder, end).returncode == 0


def test_a_process_that_is_killed_is_swept_though_one_that_it_forked_lives_on(folder: Path) -> None:
    end = (
        "pid = os.fork()\n"
        "if pid == 0:\n"
        "    print(os.getpid(), flush=True); time.sleep(120); os._exit(0)\n"
        "os.kill(os.getpid(), 9)\n"
    )
    command = [sys.executable, "-c", SCRIPT + end, str(folder)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        boot, child = process.stdout.readline().strip(), int(process.stdout.readline())
        try:
            assert process.wait(60) == -signal.SIGKILL
            assert (folder / f".{boot}.lock").exists()
            capture = start_capture(folder)
            assert not (folder / f".{boot}.lock").exists()
            assert read_card(folder / "engine.json").boot == capture.boot
            capture.close(10)
        finally:
            os.kill(child, signal.SIGKILL)


def test_a_forked_process_that_ends_leaves_the_capture_of_its_parent_alone(folder: Path) -> None:
    done = run(folder, "pid = os.fork()\nif pid: assert os.waitpid(pid, 0)[1] == 0\n")
    assert done.returncode == 0, done.stderr
    assert len(list(folder.glob("hr-*.safetensors"))) == 30
    assert lost(folder, prompt(500, ordinal=99)).reason == "aborted"


def test_ranks_of_one_server_share_a_folder(folder: Path) -> None:
    ranks = [start_capture(folder) for _ in range(3)]
    prompts = [prompt(50, ordinal=ordinal) for ordinal in range(30)]
    for number, one in enumerate(prompts):
        assert ranks[number % 3].forward(forward_of([(one, 0, 25)])) == {}
        if number == 15:  # one more comes while they work
            ranks.append(start_capture(folder))
        assert ranks[number % 3].forward(forward_of([(one, 25, 50)])) == {}
    for rank in ranks:
        assert rank.flush(30)
    for one in prompts:
        assert_published(folder, one)
    assert read_card(folder / "engine.json").boot == ranks[-1].boot
    for rank in ranks:
        rank.close(10)
    assert len(list(folder.glob("stats.*.json"))) == 4
    assert not [path for path in folder.iterdir() if path.name.startswith(".")]


def test_threads_that_cannot_be_started_are_a_usage_error_and_leave_nothing(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, start, left = threading.active_count(), threading.Thread.start, [2]

    def refuse(thread: threading.Thread) -> None:
        left[0] -= 1
        if left[0] < 0:
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refuse)
    for writers in (4, 2):  # at a writer, and at the one that looks after them
        left[0] = 2
        with pytest.raises(UsageError, match="can't start new thread"):
            start_capture(folder, writers=writers)
    monkeypatch.undo()
    wait_until(lambda: threading.active_count() == before, what="the end of the threads")
    assert not [path for path in folder.iterdir() if path.name.startswith(".")]

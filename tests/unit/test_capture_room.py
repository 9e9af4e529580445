from __future__ import annotations

import threading

import pytest

from headrace_capture.room import Room
from tests.support.waiting import wait_until


class Filesystem:
    """What a filesystem says of itself; it may fail, or not answer."""

    def __init__(self, free: int) -> None:
        self.free = free
        self.fails = False
        self.answers = threading.Event()
        self.answers.set()
        self.asked = 0

    def ask(self) -> int:
        self.asked += 1
        assert self.answers.wait(60)
        if self.fails:
            raise OSError(116, "Stale file handle")
        return self.free


def test_room_is_what_is_free_less_what_is_promised() -> None:
    room = Room(Filesystem(100).ask)
    assert room.promise(60) is None
    assert room.promise(41) == "the dump needs 41 bytes, the folder has 100 and 60 are promised"
    assert room.promise(40) is None
    room.give_back(60)
    assert room.promise(60) is None and room.promise(1) is not None


def test_what_was_written_counts_as_gone_until_the_next_measurement_and_not_twice_after_it() -> None:
    filesystem = Filesystem(100)
    room = Room(filesystem.ask)
    assert room.promise(60) is None
    room.take(60)
    assert room.promise(41) is not None
    filesystem.free = 40
    room.measure(1.0)
    assert room.promise(41) is not None and room.promise(40) is None


def test_what_others_remove_is_there_after_the_next_measurement() -> None:
    filesystem = Filesystem(10)
    room = Room(filesystem.ask)
    filesystem.free = 100
    assert room.promise(50) is not None
    room.measure(1.0)
    assert room.promise(50) is None


def test_an_error_is_told_until_the_filesystem_answers_again() -> None:
    filesystem = Filesystem(100)
    room = Room(filesystem.ask)
    filesystem.fails = True
    room.measure(1.0)
    assert "Stale file handle" in room.problem and room.promise(1) is not None
    filesystem.fails = False
    room.measure(2.0)
    assert room.problem == "" and room.promise(100) is None


def test_a_filesystem_that_does_not_answer_holds_up_one_thread_and_no_promise() -> None:
    filesystem = Filesystem(100)
    room = Room(filesystem.ask)
    filesystem.answers.clear()
    asker = threading.Thread(target=room.measure, args=(1.0,))
    asker.start()
    wait_until(lambda: filesystem.asked == 2)
    room.measure(2.0)
    assert room.promise(100) is None and room.promise(1) is not None
    room.take(100)
    filesystem.free = 0
    filesystem.answers.set()
    asker.join()
    assert filesystem.asked == 2
    assert room.promise(1) is not None  # what was written while it was asked is never forgotten


def test_it_is_not_asked_more_often_than_wanted() -> None:
    filesystem = Filesystem(100)
    room = Room(filesystem.ask)
    for now in (10.0, 10.01, 10.04, 10.06):
        room.measure(now, every=0.05)
    assert filesystem.asked == 3


def test_a_filesystem_that_cannot_be_asked_at_the_start_is_an_error() -> None:
    filesystem = Filesystem(100)
    filesystem.fails = True
    with pytest.raises(OSError, match="Stale"):
        Room(filesystem.ask)

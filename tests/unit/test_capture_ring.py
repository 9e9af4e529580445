from __future__ import annotations

import random
import threading
import time
from collections import deque
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.errors import UsageError
from headrace_capture.assembly import Place
from headrace_capture.batching import batches
from headrace_capture.config import CaptureConfig
from headrace_capture.ring import ALIGN, Ring, Slot


def now() -> float:
    return time.monotonic()


@given(st.lists(st.tuples(st.integers(1, 500), st.integers(0, 100)), max_size=60))
def test_slots_never_overlap_whatever_the_order_of_their_release(steps: list[tuple[int, int]]) -> None:
    ring = Ring(1000)
    held: list[Slot] = []
    for nbytes, pick in steps:
        slot = ring.acquire(nbytes, 1, now())
        if slot is None:
            assert held, "an empty ring has room"
        else:
            assert slot.begin >= 0 and slot.end <= 1000 and slot.end - slot.begin == nbytes
            assert slot.begin % ALIGN == 0
            assert all(slot.end <= other.begin or other.end <= slot.begin for other in held)
            held.append(slot)
        if held and pick % 2:
            ring.release(held.pop(pick % len(held)))
        assert ring.in_use == sum(s.end - s.begin for s in held)
    for slot in held:
        ring.release(slot)
    assert ring.in_use == 0
    assert ring.acquire(1000, 1, now()) is not None


def test_a_shared_slot_is_free_when_its_last_job_is_done() -> None:
    ring = Ring(100)
    slot = ring.acquire(100, 2, now())
    assert slot is not None
    ring.release(slot)
    assert ring.acquire(1, 1, now()) is None
    ring.release(slot)
    assert ring.acquire(100, 1, now()) is not None


def test_a_wait_ends_with_a_release() -> None:
    ring = Ring(100)
    slot = ring.acquire(100, 1, now())
    assert slot is not None
    releaser = threading.Thread(target=ring.release, args=(slot,))
    releaser.start()
    assert ring.acquire(100, 1, now() + 30) is not None
    releaser.join()


def test_a_wait_without_a_release_ends_at_its_deadline() -> None:
    ring = Ring(100)
    ring.acquire(100, 1, now())
    assert ring.acquire(1, 1, now() + 0.01) is None


def test_after_a_wait_in_which_nothing_moved_nobody_waits_until_something_does() -> None:
    ring = Ring(100)
    slot = ring.acquire(100, 3, now())
    assert slot is not None
    assert ring.acquire(1, 1, now()) is None  # no wait, which says nothing
    assert ring.acquire(1, 1, now() + 0.01) is None
    assert ring.acquire(1, 1, now() + 1000) is None  # at once
    ring.release(slot)
    assert ring.acquire(1, 1, now() + 0.01) is None  # no room yet, but a job ended: this one waited
    ring.release(slot)
    releaser = threading.Timer(0.05, ring.release, (slot,))
    releaser.start()
    assert ring.acquire(1, 1, now() + 30) is not None
    releaser.join()


def test_what_is_larger_than_the_ring_is_refused_at_once() -> None:
    assert Ring(100).acquire(101, 1, now() + 1000) is None


def test_memory_that_cannot_be_had_is_a_usage_error() -> None:
    with pytest.raises(UsageError, match="HEADRACE_CAPTURE_BUFFER_BYTES"):
        Ring(1 << 60)


def place(source: int, begin: int, end: int, complete: bool = True) -> Place:
    return Place(
        request=f"r{source}",
        tokens=1000,
        source=source,
        begin=begin,
        end=end,
        first=True,
        complete=complete,
        parts=1,
        retractions=0,
    )


@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(1, 30), st.integers(0, 5), st.booleans()), max_size=12),
    st.integers(1, 20),
)
def test_batches_hold_every_row_once_and_only_rows_of_places(
    steps: list[tuple[int, int, int, bool]], max_rows: int
) -> None:
    places, source = [], 0
    for gap, rows, begin, complete in steps:
        places.append(place(source + gap, begin, begin + rows, complete))
        source += gap + rows
    made = batches(places, max_rows)
    rows = [
        (cut.source + i, cut.place.request, cut.at + i) for batch in made for cut in batch.cuts for i in range(cut.rows)
    ]
    assert rows == [(p.source + i, p.request, p.begin + i) for p in places for i in range(p.end - p.begin)]
    for batch in made:
        assert 0 < batch.rows <= max_rows
        assert batch.rows == sum(cut.rows for cut in batch.cuts)
        assert batch.begin == batch.cuts[0].source
    completing = [cut.place.request for batch in made for cut in batch.cuts if cut.completes]
    assert completing == [p.request for p in places if p.complete]


def test_the_buffer_that_is_made_for_an_engine_has_room_for_a_launched_forward_beside_two_that_are_held() -> None:
    rows, row_bytes, lengths = 2048, 64, random.Random(1)
    ring = Ring(CaptureConfig(dump_dir=Path("/dump")).buffer_for(1 << 20, rows) // (1 << 20) * row_bytes)
    max_rows = ring.capacity // 6 // row_bytes
    held: deque[list[Slot]] = deque()
    rest = 0  # of a prompt that the last forward cut
    for _ in range(200):
        places: list[Place] = []
        row = 0
        while row < rows:
            prompt = rest or lengths.randint(64, 448)
            end = min(row + prompt, rows)
            rest = row + prompt - end
            places.append(place(row, 0, end - row))
            row = end
        if len(held) > 2:
            for slot in held.popleft():
                ring.release(slot)
        slots = [ring.acquire(batch.rows * row_bytes, 1, now()) for batch in batches(places, max_rows)]
        assert None not in slots
        held.append([slot for slot in slots if slot])

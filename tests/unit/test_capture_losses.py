from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Iterator
from itertools import count
from pathlib import Path

import pytest
import torch

from headrace_capture.core import Capture
from headrace_capture.forward import Forward, Piece
from tests.support.capture import (
    HIDDEN,
    Prompt,
    assert_published,
    dump_path,
    forward_of,
    leftovers,
    lost,
    prompt,
    start_capture,
)
from tests.support.filesystems import small_tmpfs
from tests.support.waiting import wait_until


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Path]:
    """A file system of 256 KiB."""
    with small_tmpfs(tmp_path / "small", 256) as place:
        yield place


def forward(capture: Capture, made: Forward) -> dict[str, str]:
    dropped = capture.forward(made)
    assert capture.flush(30)
    return dropped


def assert_lost(folder: Path, wanted: Prompt, reason: str, capture: Capture) -> str:
    notice = lost(folder, wanted)
    assert (notice.reason, notice.boot, notice.request) == (reason, capture.boot, wanted.rid)
    assert f".{capture.boot}.{wanted.rid}.part" not in leftovers(folder)
    assert capture.counts().lost[reason] == 1
    return notice.detail


def assert_works(capture: Capture, folder: Path) -> None:
    """The engine was not disturbed: the next request is captured, once the filesystem was looked at."""
    ordinals = count(1000)

    def published() -> bool:
        after = prompt(5, ordinal=next(ordinals))
        if forward(capture, forward_of([(after, 0, 5)])) or not dump_path(folder, after).exists():
            return False
        assert_published(folder, after)
        return True

    wait_until(published, what="a request that is captured")


def test_a_prefix_cache_hit_is_lost_as_prefix_cached(capture: Capture, folder: Path) -> None:
    one = prompt(400)
    assert forward(capture, forward_of([(one, 399, 400)])) == {one.rid: "dropped:prefix_cached"}
    assert "399 of 400" in assert_lost(folder, one, "prefix_cached", capture)
    assert_works(capture, folder)


def test_a_gap_is_lost_as_incomplete_and_its_file_removed(capture: Capture, folder: Path) -> None:
    one = prompt(400)
    forward(capture, forward_of([(one, 0, 100)]))
    assert forward(capture, forward_of([(one, 200, 400)])) == {one.rid: "dropped:incomplete"}
    assert "100 of 400" in assert_lost(folder, one, "incomplete", capture)


def test_an_overlong_prompts_stub_row_reserves_nothing(capture: Capture, folder: Path) -> None:
    one = prompt(900)
    stub = Forward(
        pieces=(Piece(rid=one.rid, prompt_tokens=1, prefix=0, rows=1),),
        token_ids=torch.zeros(1, dtype=torch.int64),
        boundaries=tuple(b[:1] for b in one.boundaries),
        final=one.final[:1],
        weight_version="w",
    )
    assert forward(capture, stub) == {one.rid: "dropped:incomplete"}
    assert "900 tokens, the engine's prompt has 1" in assert_lost(folder, one, "incomplete", capture)


def test_another_half_prefilled_request_evicts_and_a_late_part_reopens_nothing(capture: Capture, folder: Path) -> None:
    one, two = prompt(100, ordinal=1), prompt(100, ordinal=2)
    forward(capture, forward_of([(one, 0, 50)]))
    assert forward(capture, forward_of([(two, 0, 50)])) == {one.rid: "dropped:evicted"}
    assert two.rid in assert_lost(folder, one, "evicted", capture)
    assert forward(capture, forward_of([(one, 50, 100)])) == {}
    assert forward(capture, forward_of([(two, 50, 100)])) == {}
    assert_published(folder, two)
    assert not dump_path(folder, one).exists() and leftovers(folder) == []


def test_a_half_prefilled_request_is_evicted_at_its_deadline_without_another_forward(folder: Path) -> None:
    capture = start_capture(folder, deadline_seconds=0.05)
    one = prompt(100)
    capture.forward(forward_of([(one, 0, 50)]))
    wait_until(lambda: capture.counts().lost.get("evicted"), what="the deadline")
    assert capture.flush(30)
    assert "0.05 s" in assert_lost(folder, one, "evicted", capture)
    assert_works(capture, folder)
    capture.close(10)


def test_an_abort_gives_up_what_is_half_assembled(capture: Capture, folder: Path) -> None:
    one, two = prompt(100, ordinal=1), prompt(100, ordinal=2)
    forward(capture, forward_of([(one, 0, 50)]))
    for rid in (one.rid, one.rid, two.rid, "someone-else"):
        capture.abort(rid)
    assert capture.flush(30)
    assert_lost(folder, one, "aborted", capture)
    assert capture.counts().lost == {"aborted": 1}
    assert forward(capture, forward_of([(one, 50, 100)])) == {}
    assert leftovers(folder) == []


def test_an_abort_after_the_last_row_takes_nothing_back(capture: Capture, folder: Path) -> None:
    one = prompt(100)
    capture.forward(forward_of([(one, 0, 100)]))
    capture.abort(one.rid)
    assert capture.flush(30)
    assert_published(folder, one)


def test_parts_of_two_weight_versions_never_mix(capture: Capture, folder: Path) -> None:
    one = prompt(100)
    forward(capture, forward_of([(one, 0, 50)], weight_version="a"))
    assert forward(capture, forward_of([(one, 50, 100)], weight_version="b")) == {one.rid: "dropped:incomplete"}
    assert "'a' to 'b'" in assert_lost(folder, one, "incomplete", capture)


def test_without_room_for_the_whole_dump_nothing_is_written(small: Path) -> None:
    folder = small / "dumps"
    capture = start_capture(folder)
    one = prompt(3000)
    assert forward(capture, forward_of([(one, 0, 100)])) == {one.rid: "dropped:no_room"}
    assert str(folder) not in assert_lost(folder, one, "no_room", capture)
    assert_works(capture, folder)
    capture.close(10)


def test_room_that_is_promised_to_one_request_is_not_given_to_the_next(small: Path) -> None:
    folder = small / "dumps"
    capture = start_capture(folder)
    one, two = prompt(1000, ordinal=1), prompt(1000, ordinal=2)  # 132 KiB each
    assert forward(capture, forward_of([(one, 0, 10)])) == {}
    assert forward(capture, forward_of([(two, 0, 1000)])) == {two.rid: "dropped:no_room"}
    assert forward(capture, forward_of([(one, 10, 1000)])) == {}
    assert_published(folder, one)
    capture.close(10)


def test_room_that_others_took_meanwhile_costs_the_request_and_not_the_engine(small: Path) -> None:
    folder = small / "dumps"
    capture = start_capture(folder)
    one = prompt(1000)
    assert forward(capture, forward_of([(one, 0, 10)])) == {}
    filler = small / "filler"
    with filler.open("wb", buffering=0) as file:
        room = os.statvfs(small).f_bavail * os.statvfs(small).f_frsize
        file.write(bytes(room - 8192))
    forward(capture, forward_of([(one, 10, 1000)]))
    assert_lost(folder, one, "no_room", capture)
    filler.unlink()
    assert_works(capture, folder)
    capture.close(10)


def test_when_not_even_a_notice_fits_the_loss_is_counted(small: Path) -> None:
    folder = small / "dumps"
    capture = start_capture(folder)
    with (small / "filler").open("wb", buffering=0) as file:
        room = os.statvfs(small).f_bavail * os.statvfs(small).f_frsize
        file.write(bytes(room))
    one = prompt(10)
    # Found by whoever comes first: the look at the filesystem, or the writer.
    assert forward(capture, forward_of([(one, 0, 10)])) in ({}, {one.rid: "dropped:no_room"})
    assert capture.counts().lost == {"no_room": 1}
    assert not list(folder.glob("hr-*")) and leftovers(folder) == []
    (small / "filler").unlink()
    assert_works(capture, folder)
    capture.close(10)


def test_a_writer_that_meets_an_error_loses_the_request_and_goes_on(folder: Path) -> None:
    capture = start_capture(folder, writers=1)
    one, two = prompt(50, ordinal=1), prompt(50, ordinal=2)
    (folder / f".{capture.boot}.{one.rid}.part").mkdir()  # where the hidden file would be
    forward(capture, forward_of([(one, 0, 50), (two, 0, 50)]))
    assert lost(folder, one).reason == "internal" and "File exists" in lost(folder, one).detail
    assert_published(folder, two)
    assert capture.counts().buffer_bytes == 0
    assert_works(capture, folder)
    capture.close(10)


def test_a_folder_that_vanished_costs_requests_and_not_the_engine(folder: Path) -> None:
    capture = start_capture(folder)
    shutil.rmtree(folder)
    for ordinal in range(3):
        forward(capture, forward_of([(prompt(20, ordinal=ordinal), 0, 20)]))
    counts = capture.counts()
    assert (counts.lost, counts.published, counts.buffer_bytes) == ({"internal": 3}, 0, 0)
    capture.close(10)


def test_without_buffer_room_in_time_the_rest_is_lost_and_the_forward_goes_on(folder: Path) -> None:
    one, two = prompt(400, ordinal=1), prompt(4, ordinal=2)
    capture = start_capture(folder, buffer_bytes=8192, writers=1, max_wait_seconds=0)
    release = _stuck_writer(capture, folder)
    dropped = capture.forward(forward_of([(one, 0, 400), (two, 0, 4)]))
    assert dropped == {one.rid: "dropped:no_room", two.rid: "dropped:no_room"}
    release.set()
    assert capture.flush(30)
    assert "8192 bytes" in lost(folder, one).detail
    assert leftovers(folder) == [] and capture.counts().buffer_bytes == 0
    assert_works(capture, folder)
    capture.close(10)


def test_every_request_ends_exactly_once_whatever_happens_at_the_same_time(folder: Path) -> None:
    capture = start_capture(folder, buffer_bytes=1 << 14, writers=3, max_wait_seconds=0.001, deadline_seconds=0.05)
    prompts = [prompt(20 + ordinal % 90, ordinal=ordinal) for ordinal in range(150)]
    current, done = [""], threading.Event()

    def abort() -> None:
        while not done.wait(0.0005):
            capture.abort(current[0])

    aborter = threading.Thread(target=abort)
    aborter.start()
    for number, one in enumerate(prompts):
        current[0], cut = one.rid, one.tokens // 2
        beside = prompts[number * 7 % len(prompts)]
        capture.forward(forward_of([(one, 0, cut), (beside, 0, beside.tokens)]))
        capture.forward(forward_of([(one, cut, one.tokens)]))
    done.set()
    aborter.join()
    assert capture.flush(60)
    counts = capture.counts()
    published = [one for one in prompts if dump_path(folder, one).exists()]
    for one in published:
        assert_published(folder, one)
    for one in prompts:
        if not dump_path(folder, one).exists():
            assert lost(folder, one).reason in counts.lost
    assert len(list(folder.glob("*.lost.json"))) == sum(counts.lost.values()) == len(prompts) - len(published)
    assert (counts.published, counts.buffer_bytes, counts.half_assembled) == (len(published), 0, 0)
    assert leftovers(folder) == []
    capture.close(10)


def test_a_forward_that_makes_the_capture_stumble_does_not_reach_the_engine(capture: Capture, folder: Path) -> None:
    one = prompt(20)
    good = forward_of([(one, 0, 20)])
    broken = Forward(
        pieces=good.pieces,
        token_ids=None,  # type: ignore[arg-type]
        boundaries=good.boundaries,
        final=good.final,
        weight_version=good.weight_version,
    )
    assert forward(capture, broken) == {one.rid: "dropped:internal"}
    assert "AttributeError" in assert_lost(folder, one, "internal", capture)
    assert_works(capture, folder)


def _stuck_writer(capture: Capture, folder: Path) -> threading.Event:
    """Occupy the one writer thread, as a disk that hangs would, until the event."""
    release = threading.Event()
    capture._publisher._writers[0].put(lambda: release.wait(60) and None)
    return release


def test_a_forward_of_another_form_than_declared_loses_its_requests_with_the_reason(
    capture: Capture, folder: Path
) -> None:
    one = prompt(20)
    good = forward_of([(one, 0, 20)])
    wide = torch.zeros(20, HIDDEN + 1, dtype=torch.bfloat16)
    bad = [
        ("boundaries", {"boundaries": good.boundaries[:2]}),
        ("declared torch.bfloat16", {"final": good.final.float()}),
        ("declared torch.bfloat16 [T, 16]", {"final": wide}),
        ("the tensors [19", {"token_ids": good.token_ids[:19]}),
        ("not one row of integers", {"token_ids": good.token_ids.float()}),
        ("negative", {"pieces": (Piece(rid=one.rid, prompt_tokens=20, prefix=-1, rows=20),)}),
        ("engine declared cpu", {"final": good.final.to("meta")}),
    ]
    for number, (detail, change) in enumerate(bad):
        wanted = prompt(20, ordinal=100 + number)
        parts = {name: getattr(good, name) for name in Forward.__dataclass_fields__} | change
        parts["pieces"] = tuple(
            Piece(rid=wanted.rid, prompt_tokens=p.prompt_tokens, prefix=p.prefix, rows=p.rows) for p in parts["pieces"]
        )
        assert forward(capture, Forward(**parts)) == {wanted.rid: "dropped:internal"}
        assert detail in lost(folder, wanted).detail
    assert capture.counts().lost == {"internal": len(bad)}
    assert_works(capture, folder)


def test_an_abort_of_what_is_no_id_is_logged_and_no_error(
    capture: Capture, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    capture.abort(["no id"])  # type: ignore[arg-type]
    wait_until(lambda: "aborting a request" in caplog.text, what="the log")
    assert_works(capture, folder)


def test_a_forward_without_states_loses_its_requests_with_the_reason(capture: Capture, folder: Path) -> None:
    one, half, other = prompt(20, ordinal=1), prompt(20, ordinal=2), prompt(20, rid="other")
    assert forward(capture, forward_of([(half, 0, 10)])) == {}
    pieces = (
        Piece(rid=one.rid, prompt_tokens=20, prefix=0, rows=20),
        Piece(rid=half.rid, prompt_tokens=20, prefix=10, rows=10),
        Piece(rid=other.rid, prompt_tokens=20, prefix=0, rows=20),
    )
    expected = {one.rid: "dropped:internal", half.rid: "dropped:internal"}
    assert capture.refuse(pieces, "a replayed graph") == expected
    assert capture.refuse(pieces, "a replayed graph") == {}
    assert capture.flush(30)
    assert [lost(folder, wanted).detail for wanted in (one, half)] == ["a replayed graph"] * 2
    assert capture.counts().lost == {"internal": 2}
    assert_works(capture, folder)

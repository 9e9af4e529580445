from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from headrace.capturestats import CaptureStats, read_stats, stats_file
from headrace.dumpfolder import read_card, read_norm
from headrace.errors import Unreadable
from headrace_capture.core import Capture
from headrace_capture.meter import Meter
from tests.support.capture import HIDDEN, assert_published, forward_of, lost, prompt, start_capture
from tests.support.waiting import wait_until


def read(folder: Path, capture: Capture) -> CaptureStats | None:
    try:
        return read_stats(folder / stats_file(capture.boot))
    except FileNotFoundError:
        return None


def test_the_statistics_file_tells_what_was_done_and_what_it_cost(capture: Capture, folder: Path) -> None:
    one, two = prompt(40, ordinal=1), prompt(60, ordinal=2)
    capture.forward(forward_of([(one, 0, 40)]))
    capture.forward(forward_of([(two, 59, 60)], decode=[prompt(5, rid="other")]))
    capture.forward(forward_of([(prompt(5, rid="other"), 0, 5)]))
    assert capture.flush(30)
    stats = wait_until(lambda: (found := read(folder, capture)) and found.published == 1 and found, what="the file")
    assert stats == capture.stats()
    assert (stats.boot, stats.lost, stats.ignored, stats.half_assembled) == (capture.boot, {"prefix_cached": 1}, 2, 0)
    assert stats.published_bytes == capture.counts().published_bytes > 0
    assert stats.forwards == 2 and 0 < stats.forward_ms_p50 <= stats.forward_ms_p99 <= stats.forward_ms_max
    assert (stats.ring_bytes, stats.buffer_bytes, stats.pinned_bytes, stats.device_bytes) == (1 << 20, 0, 0, 0)
    assert (folder / stats_file(capture.boot)).stat().st_mode & 0o7777 == 0o640


def test_the_last_statistics_are_written_at_the_end_and_swept_by_the_next_boot(folder: Path) -> None:
    first = start_capture(folder)
    first.forward(forward_of([(prompt(40), 0, 30)]))
    first.close(10)
    assert read_stats(folder / stats_file(first.boot)).lost == {"aborted": 1}
    second = start_capture(folder)
    assert not (folder / stats_file(first.boot)).exists()
    second.close(10)


def test_quantiles_are_of_the_latest_forwards() -> None:
    meter = Meter()
    assert meter.quantiles() == (0, 0, 0)
    meter.add(7)
    assert meter.quantiles() == (7, 7, 7)
    for number in range(5000):
        meter.add(number % 1000)
    assert meter.forwards == 5001
    median, high, most = meter.quantiles()
    assert 480 <= median <= 520 and 985 <= high <= 999 and most == 999


STATS = CaptureStats(
    boot="abcdefghijkl",
    published=1,
    published_bytes=2,
    lost={"no_room": 3},
    ignored=4,
    half_assembled=0,
    forwards=5,
    forward_ms_p50=0.1,
    forward_ms_p99=0.2,
    forward_ms_max=3,
    waited_ms=0.0,
    buffer_bytes=0,
    ring_bytes=1,
    pinned_bytes=1,
    device_bytes=1,
)


def test_statistics_come_back_as_they_were(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(STATS.encode())
    assert read_stats(tmp_path / "x") == STATS


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"schema": 99}, "newer"),
        ({"schema": "1"}, "schema"),
        ({"published": -1}, "published"),
        ({"published": True}, "published"),
        ({"lost": {"no_room": 1.5}}, "lost"),
        ({"lost": []}, "lost"),
        ({"waited_ms": float("nan")}, "waited_ms"),
        ({"boot": 5}, "boot"),
        ({"more": 5}, "more"),
    ],
)
def test_what_are_no_statistics_is_unreadable(tmp_path: Path, change: dict[str, Any], why: str) -> None:
    table = json.loads(STATS.encode()) | change
    (tmp_path / "x").write_text(json.dumps(table))
    with pytest.raises(Unreadable, match=why):
        read_stats(tmp_path / "x")


@pytest.mark.parametrize("text", ["", "[]", "{", '"x"'])
def test_what_is_no_json_object_is_unreadable(tmp_path: Path, text: str) -> None:
    (tmp_path / "x").write_text(text)
    with pytest.raises(Unreadable):
        read_stats(tmp_path / "x")


def test_losses_are_logged_in_one_line_however_many(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    capture = start_capture(folder)
    for ordinal in range(300):
        capture.forward(forward_of([(prompt(40, ordinal=ordinal), 39, 40)]))
    capture.close(10)
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) <= 2
    assert "prefix_cached" in lines[-1] and "39 of 40" in lines[-1]


def test_the_engine_goes_on_in_a_folder_that_takes_the_place_of_a_removed_one(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    capture = start_capture(folder, norm_weight=torch.ones(HIDDEN), deadline_seconds=0.2)
    card = read_card(folder / "engine.json")
    capture.forward(forward_of([(prompt(40, ordinal=7), 0, 30)]))
    shutil.rmtree(folder)
    capture.forward(forward_of([(prompt(40, ordinal=1), 0, 40)]))
    wait_until(lambda: capture.counts().lost.get("internal"), what="the loss")
    folder.mkdir()
    (folder / ".deadbootdead.hr-x.part").touch()  # what another engine left, or whoever made the folder
    wait_until(lambda: (folder / "engine.json").exists(), what="the card")
    assert read_card(folder / "engine.json") == card
    assert read_norm(folder / card.norm_file).hidden_size == HIDDEN
    assert not (folder / ".deadbootdead.hr-x.part").exists()
    after = prompt(40, ordinal=2)
    assert capture.forward(forward_of([(after, 0, 40)])) == {}
    assert capture.flush(30)
    assert_published(folder, after)
    assert "goes on in it" in caplog.text
    wait_until(lambda: read(folder, capture), what="the statistics")
    capture.close(10)
    assert not [path for path in folder.iterdir() if path.name.startswith(".")]


def test_a_folder_that_cannot_be_used_in_its_place_is_told_once_and_left(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    capture = start_capture(folder, deadline_seconds=0.02)
    folder.rename(folder.with_name("moved"))
    folder.write_text("no folder")
    wait_until(lambda: "cannot be used" in caplog.text, what="the warning")
    one = prompt(40)
    assert capture.forward(forward_of([(one, 0, 40)])) == {}
    assert capture.flush(30)
    assert_published(folder.with_name("moved"), one)  # whoever looks there still finds it
    assert caplog.text.count("cannot be used") == 1
    capture.close(10)


def test_without_room_for_the_statistics_they_come_later(folder: Path) -> None:
    capture = start_capture(folder)
    hidden = folder / f".{capture.boot}.{stats_file(capture.boot)}.tmp"
    hidden.mkdir()  # in the way
    capture.forward(forward_of([(prompt(40), 39, 40)]))
    assert capture.flush(30)
    assert lost(folder, prompt(40)).reason == "prefix_cached"
    hidden.rmdir()
    stats = wait_until(lambda: (found := read(folder, capture)) and found.forwards and found, what="the file")
    assert replace(stats, waited_ms=0) == replace(capture.stats(), waited_ms=0)
    capture.close(10)

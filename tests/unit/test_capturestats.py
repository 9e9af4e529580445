"""A boot's statistics as whoever reads the folder finds them, hostile ones included."""

from __future__ import annotations

import json
import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from headrace.capturestats import CaptureStats, read_stats, stats_file
from headrace.errors import Unreadable

STATS = CaptureStats(
    boot="b1",
    published=7,
    published_bytes=1,
    lost={"evicted": 2},
    ignored=0,
    half_assembled=0,
    forwards=9,
    forward_ms_p50=0.125,
    forward_ms_p99=1,
    forward_ms_max=2.0,
    waited_ms=0.0,
    buffer_bytes=0,
    ring_bytes=1,
    pinned_bytes=1,
    device_bytes=0,
)


def test_statistics_round_trip(tmp_path: Path) -> None:
    path = tmp_path / stats_file("b1")
    path.write_bytes(STATS.encode())
    assert read_stats(path) == STATS


@pytest.mark.parametrize(
    "changes",
    [
        {"schema": 2},
        {"boot": 7},
        {"published": -1},
        {"published": True},
        {"published": 10**400},
        {"lost": {"evicted": 10**400}},
        {"lost": ["evicted"]},
        {"forward_ms_p50": 10**400},
        {"forward_ms_p50": float("nan")},
        {"forward_ms_p50": float("inf")},
        {"forward_ms_p50": "0"},
        {"colour": "red"},
    ],
)
def test_wrong_statistics_are_unreadable(tmp_path: Path, changes: dict[str, Any]) -> None:
    path = tmp_path / stats_file("b1")
    path.write_text(json.dumps({**asdict(STATS), **changes}))
    with pytest.raises(Unreadable):
        read_stats(path)


def test_what_is_no_file_of_statistics_is_unreadable_at_once(tmp_path: Path) -> None:
    path = tmp_path / stats_file("b1")
    os.mkfifo(path)
    with pytest.raises(Unreadable):
        read_stats(path)
    path.unlink()
    path.symlink_to("/etc/passwd")
    with pytest.raises(Unreadable):
        read_stats(path)
    path.unlink()
    path.touch()
    os.truncate(path, 1 << 40)
    with pytest.raises(Unreadable):
        read_stats(path)

from __future__ import annotations

from pathlib import Path

import pytest

from headrace.manifest import Line, Status
from headrace_writer.manifest import ManifestIndex, ManifestWriter
from tests.support.stores import lines_of


def make_line(ordinal: int, status: Status = "stored", at: str = "2026-07-23T10:15:00Z") -> Line:
    return Line(
        ordinal=ordinal,
        sample=f"s{ordinal}",
        status=status,
        reason="",
        request="",
        tokens=12,
        path="",
        bytes=0,
        checksum="",
        boundaries=(2, 4, 6),
        proof="ids",
        at=at,
    )


def segments(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "manifest").iterdir())


def test_a_writer_makes_one_segment_and_only_with_its_first_line(tmp_path: Path) -> None:
    writer = ManifestWriter(tmp_path, "w1")
    writer.append()
    assert not (tmp_path / "manifest").exists()
    writer.append(make_line(1))
    writer.append(make_line(2), make_line(3))
    writer.close()
    assert segments(tmp_path) == ["20260723T101500Z-w1.jsonl"]
    assert lines_of(tmp_path) == [make_line(1), make_line(2), make_line(3)]


def test_a_segment_that_exists_is_not_continued(tmp_path: Path) -> None:
    for _ in range(2):
        writer = ManifestWriter(tmp_path, "w1")
        writer.append(make_line(1))
        writer.close()
    assert segments(tmp_path) == ["20260723T101500Z-w1-2.jsonl", "20260723T101500Z-w1.jsonl"]


def test_the_index_takes_in_what_every_writer_appends(tmp_path: Path) -> None:
    index = ManifestIndex(tmp_path, 10)
    index.refresh()
    assert index.status(1) is None
    first, second = ManifestWriter(tmp_path, "w1"), ManifestWriter(tmp_path, "w2")
    first.append(make_line(1))
    second.append(make_line(2, "rejected"))
    index.refresh()
    assert [index.status(ordinal) for ordinal in (1, 2, 3)] == ["stored", "rejected", None]
    second.append(make_line(3, "failed"))
    assert index.status(3) is None
    index.refresh()
    assert index.status(3) == "failed"


def test_a_stored_line_wins_over_a_failed_one_in_any_order(tmp_path: Path) -> None:
    writer = ManifestWriter(tmp_path, "w1")
    writer.append(make_line(1, "failed"), make_line(1), make_line(2), make_line(2, "failed"))
    index = ManifestIndex(tmp_path, 10)
    index.refresh()
    assert index.status(1) == index.status(2) == "stored"


def test_find_gives_every_line_of_one_ordinal_and_no_other(tmp_path: Path) -> None:
    first, second = ManifestWriter(tmp_path, "w1"), ManifestWriter(tmp_path, "w2")
    first.append(*(make_line(ordinal) for ordinal in range(40)))
    again = make_line(1, at="2026-07-24T00:00:00Z")
    second.append(again, make_line(11))
    index = ManifestIndex(tmp_path, 100)
    assert index.find(1) == [make_line(1), again]
    assert index.find(77) == []
    assert index.find_all({1, 2, 77}) == {1: [make_line(1), again], 2: [make_line(2)]}


def test_a_torn_tail_counts_as_absent_and_is_not_continued(tmp_path: Path) -> None:
    torn = ManifestWriter(tmp_path, "w1")
    torn.append(make_line(1))
    torn.close()
    with (tmp_path / "manifest" / "20260723T101500Z-w1.jsonl").open("ab") as file:
        file.write(make_line(2).encode()[:30])
    index = ManifestIndex(tmp_path, 10)
    index.refresh()
    assert (index.status(1), index.status(2)) == ("stored", None)
    ManifestWriter(tmp_path, "w1").append(make_line(2))
    index.refresh()
    assert index.status(2) == "stored"
    assert index.find(2) == [make_line(2)]
    assert segments(tmp_path) == ["20260723T101500Z-w1-2.jsonl", "20260723T101500Z-w1.jsonl"]


@pytest.mark.parametrize("text", [b"{}\n", b"garbage\n", b"\n", b'{"schema": 99}\n', b"\xff\xfe\n"])
def test_damaged_lines_and_ordinals_of_no_sample_count_as_absent(tmp_path: Path, text: bytes) -> None:
    writer = ManifestWriter(tmp_path, "w1")
    writer.append(make_line(1), make_line(10), make_line(-1), make_line(10**11))
    (tmp_path / "manifest" / "other.jsonl").write_bytes(text + make_line(2).encode())
    index = ManifestIndex(tmp_path, 10)
    index.refresh()
    assert [ordinal for ordinal in range(10) if index.status(ordinal)] == [1, 2]

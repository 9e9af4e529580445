from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.errors import Unreadable
from headrace.manifest import (
    DATASET_FILE,
    MANIFEST_FOLDER,
    STATUSES,
    Damage,
    Dataset,
    Line,
    ManifestReader,
    decode_line,
    read_dataset,
)
from headrace.runs import Identity
from tests.unit.test_runs import SPEC

LINE = Line(
    ordinal=4,
    sample="s4",
    status="stored",
    reason="",
    request="hr-run1-4-aaaaaaaa-3-0123456789abcdef",
    tokens=3,
    path="rows/0/4.safetensors",
    bytes=2048,
    checksum="xxh3:0123456789abcdef",
    boundaries=(2, 4, 6),
    proof="ids",
    at="2026-01-01T00:00:00Z",
)
DATASET = Dataset(spec=SPEC, identity=Identity(engine="e", weight_version="w"))

texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
numbers = st.integers(0, 1 << 40)
lines = st.builds(
    Line,
    ordinal=numbers,
    sample=texts,
    status=st.sampled_from(STATUSES),
    reason=texts,
    request=texts,
    tokens=numbers,
    path=texts,
    bytes=numbers,
    checksum=texts,
    boundaries=st.lists(numbers, max_size=4).map(tuple),
    proof=texts,
    at=texts,
    schema=st.just(1),
)


def segment(folder: Path, name: str = "a.jsonl") -> Path:
    (folder / MANIFEST_FOLDER).mkdir(exist_ok=True)
    return folder / MANIFEST_FOLDER / name


@given(line=lines)
def test_a_line_round_trips_and_is_one_line(line: Line) -> None:
    data = line.encode()
    assert data.count(b"\n") == 1
    assert data.endswith(b"\n")
    assert decode_line(data) == line


@pytest.mark.parametrize(
    "changes",
    [
        {"schema": 2},
        {"schema": 0},
        {"schema": -1},
        {"schema": "1"},
        {"colour": "red"},
        {"ordinal": "4"},
        {"ordinal": 4.0},
        {"status": "done"},
        {"boundaries": ["2"]},
        {"reason": None},
    ],
)
def test_a_wrong_line_is_unreadable(changes: dict[str, Any]) -> None:
    with pytest.raises(Unreadable):
        decode_line(json.dumps({**asdict(LINE), **changes}).encode())


@pytest.mark.parametrize("data", [b"", b"{", b"[]", b"7", b"\xff", b"[" * 100_000, b"{}"])
def test_what_is_no_line_is_unreadable(data: bytes) -> None:
    with pytest.raises(Unreadable):
        decode_line(data)


def test_a_reader_goes_on_where_it_stopped_and_leaves_an_unfinished_tail(tmp_path: Path) -> None:
    reader = ManifestReader(tmp_path)
    assert list(reader.read_new()) == []
    path = segment(tmp_path)
    second = replace(LINE, ordinal=5)
    path.write_bytes(LINE.encode() + second.encode()[:-20])
    assert list(reader.read_new()) == [LINE]
    assert list(reader.read_new()) == []
    with path.open("ab") as file:
        file.write(second.encode()[-20:])
    assert list(reader.read_new()) == [second]
    segment(tmp_path, "b.jsonl").write_bytes(LINE.encode())
    segment(tmp_path, "notes.txt").write_bytes(b"not a segment\n")
    assert list(reader.read_new()) == [LINE]
    assert list(ManifestReader(tmp_path).read_new()) == [LINE, second, LINE]


def test_a_damaged_line_is_reported_by_number_and_hides_no_other(tmp_path: Path) -> None:
    segment(tmp_path).write_bytes(LINE.encode() + b"\x00\xff\n" + b"\n" + LINE.encode())
    first, damage, last = ManifestReader(tmp_path).read_new()
    assert first == last == LINE
    assert isinstance(damage, Damage)
    assert (damage.segment, damage.number) == ("a.jsonl", 2)
    assert damage.problem


def test_lines_that_do_not_mention_the_bytes_are_passed_over(tmp_path: Path) -> None:
    other = replace(LINE, ordinal=5, sample="wanted")
    segment(tmp_path).write_bytes(LINE.encode() + b"damaged\n" + other.encode())
    assert list(ManifestReader(tmp_path).read_new(mentioning=b'"wanted"')) == [other]


def test_a_segment_that_vanished_and_a_link_to_nothing_are_passed_over(tmp_path: Path) -> None:
    gone = segment(tmp_path, "a.jsonl")
    gone.write_bytes(LINE.encode())
    segment(tmp_path, "b.jsonl").symlink_to(tmp_path / "nowhere")
    other = replace(LINE, ordinal=5)
    segment(tmp_path, "c.jsonl").write_bytes(LINE.encode() + other.encode())
    lines = ManifestReader(tmp_path).read_new()
    assert next(lines) == LINE
    gone.unlink()
    assert list(lines) == [LINE, other]
    reader = ManifestReader(tmp_path)
    first = reader.read_new()
    next(first)
    segment(tmp_path, "c.jsonl").unlink()
    assert list(reader.read_new()) == []


def test_a_segment_that_cannot_be_read_is_an_error(tmp_path: Path) -> None:
    segment(tmp_path, "a.jsonl").mkdir()
    with pytest.raises(OSError, match=r"a\.jsonl"):
        list(ManifestReader(tmp_path).read_new())


def test_a_reader_that_was_left_in_the_middle_goes_on_after_what_it_gave(tmp_path: Path) -> None:
    segment(tmp_path).write_bytes(b"".join(replace(LINE, ordinal=n).encode() for n in range(3)))
    reader = ManifestReader(tmp_path)
    assert next(reader.read_new()) == replace(LINE, ordinal=0)
    assert [line.ordinal for line in reader.read_new() if isinstance(line, Line)] == [1, 2]


def test_a_dataset_round_trips_and_none_is_none(tmp_path: Path) -> None:
    assert read_dataset(tmp_path) is None
    (tmp_path / DATASET_FILE).write_bytes(DATASET.encode())
    assert read_dataset(tmp_path) == DATASET


@pytest.mark.parametrize(
    "changes",
    [
        {"schema": 2},
        {"schema": 0},
        {"schema": "1"},
        {"spec": None},
        {"spec": {}},
        {"spec": {**asdict(SPEC), "total": "100"}},
        {"spec": {**asdict(SPEC), "total": -1}},
        {"identity": None},
        {"identity": "e"},
        {"identity": {"engine": "e"}},
        {"identity": {"engine": "e", "weight_version": 1}},
    ],
)
def test_a_wrong_dataset_is_unreadable_and_named(tmp_path: Path, changes: dict[str, Any]) -> None:
    (tmp_path / DATASET_FILE).write_text(json.dumps({**asdict(DATASET), **changes}))
    with pytest.raises(Unreadable, match=DATASET_FILE):
        read_dataset(tmp_path)


@pytest.mark.parametrize("data", [b"", b"{", b"[]", b"7", b"null", b"\xff", b"[" * 100_000, b"{}"])
def test_what_is_no_dataset_is_unreadable(tmp_path: Path, data: bytes) -> None:
    (tmp_path / DATASET_FILE).write_bytes(data)
    with pytest.raises(Unreadable, match=DATASET_FILE):
        read_dataset(tmp_path)

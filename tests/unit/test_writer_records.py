"""The lines of samples without a row, and the rows that are there all the same."""

from __future__ import annotations

import os
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from headrace.errors import UsageError
from headrace.messages import Record
from headrace_writer.manifest import ManifestIndex
from headrace_writer.store import Store, Stored
from tests.support.stores import AT, Sample, assert_stored, lines_of, make_sample, make_spec


def open_store(tmp_path: Path, writer: str = "w1") -> Store:
    folder = tmp_path / "dataset"
    return Store(folder, make_spec(folder), writer)


def make_record(ordinal: int, status: Any = "failed") -> Record:
    return Record(ordinal=ordinal, sample=f"sample-{ordinal}", status=status, reason="why", request="", tokens=3)


def test_samples_without_a_row_get_one_line_each_however_often_they_are_recorded(tmp_path: Path) -> None:
    records = [make_record(1, "rejected"), make_record(2), make_record(2)]
    for writer in ("w1", "w2"):
        held = open_store(tmp_path, writer).record(records, AT)
        assert held == lines_of(tmp_path / "dataset")
    lines = lines_of(tmp_path / "dataset")
    assert [(line.ordinal, line.status, line.reason, line.tokens) for line in lines] == [
        (1, "rejected", "why", 3),
        (2, "failed", "why", 3),
    ]
    assert {(line.path, line.bytes, line.checksum, line.proof) for line in lines} == {("", 0, "", "")}


def test_a_failed_sample_whose_row_was_stored_stays_stored(tmp_path: Path) -> None:
    sample = make_sample()
    store = open_store(tmp_path)
    stored = store.store(sample.job(), sample.dump(tmp_path), AT)
    assert isinstance(stored, Stored)
    held = store.record([make_record(sample.ordinal), make_record(9)], AT)
    assert held[0] == stored.line
    assert (held[1].ordinal, held[1].status) == (9, "failed")
    assert_stored(tmp_path / "dataset", [sample])


def test_a_sample_that_failed_once_may_still_be_stored(tmp_path: Path) -> None:
    sample = make_sample()
    store = open_store(tmp_path)
    store.record([make_record(sample.ordinal)], AT)
    stored = store.store(sample.job(), sample.dump(tmp_path), AT)
    assert isinstance(stored, Stored)
    assert store.record([make_record(sample.ordinal)], AT) == [stored.line]


def test_a_record_of_no_sample_of_the_run_is_a_usage_error(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="100 samples"):
        open_store(tmp_path).record([make_record(100)], AT)


def failed(sample: Sample, attempt: int = 1, **changes: Any) -> Record:
    """The record of a sample whose last attempt failed."""
    record = Record(
        ordinal=sample.ordinal,
        sample=sample.name,
        status="failed",
        reason="dump_gone",
        request=str(sample.request(attempt)),
        tokens=len(sample.token_ids),
        mask=sample.mask,
    )
    return replace(record, **changes)


def leave_row(tmp_path: Path, sample: Sample) -> Path:
    """A row without a line: its writer died before it, and the dump folder was lost after."""
    first = make_sample(1)
    dump = sample.dump(tmp_path)
    store = open_store(tmp_path, "killed")
    store.store(first.job(), first.dump(tmp_path), AT)
    made = store._from_dump(sample.job(), dump)
    store.close()
    dump.unlink()
    assert made is not None
    return tmp_path / "dataset" / str(made.path)  # type: ignore[union-attr]


def test_a_failed_sample_whose_row_is_there_is_stored(tmp_path: Path) -> None:
    sample = make_sample()
    leave_row(tmp_path, sample)
    store = open_store(tmp_path)
    (held,) = store.record([failed(sample)], AT)
    assert (held.status, held.reason, held.request) == ("stored", "", str(sample.request(attempt=0)))
    assert_stored(tmp_path / "dataset", [make_sample(1), sample])
    assert store.record([failed(sample)], AT) == [held]
    assert len(lines_of(tmp_path / "dataset")) == 2


def test_a_failed_line_is_made_good_when_its_row_is_there(tmp_path: Path) -> None:
    sample = make_sample()
    leave_row(tmp_path, sample)
    store = open_store(tmp_path)
    (early,) = store.record([failed(sample, mask=())], AT)
    assert early.status == "failed"
    (held,) = store.record([failed(sample)], AT)
    assert held.status == "stored"
    assert_stored(tmp_path / "dataset", [make_sample(1), sample])


def test_a_sample_that_fails_again_gets_a_line_for_each_request_and_the_later_is_the_later(tmp_path: Path) -> None:
    sample = make_sample()
    store = open_store(tmp_path, "w1")
    early = [store.record([failed(sample, attempt=1)], AT)[0] for _ in range(2)]
    # The second writer's clock is an hour behind the first one's.
    store = open_store(tmp_path, "w2")
    late = [store.record([failed(sample, attempt=2, reason="nan")], AT - timedelta(hours=1))[0] for _ in range(2)]
    lines = lines_of(tmp_path / "dataset")
    assert lines == [early[0], late[0]] == [early[1], late[1]]
    assert [(line.request, line.reason) for line in lines] == [
        (str(sample.request(1)), "dump_gone"),
        (str(sample.request(2)), "nan"),
    ]
    assert lines[0].at < lines[1].at
    assert store.record([failed(sample, attempt=1)], AT) == [early[0]], "a job that comes late adds nothing"
    assert lines_of(tmp_path / "dataset") == lines


@pytest.mark.parametrize("at", ["", "9999-12-31T23:59:59Z", "2026-01-01T00:00:00", "soon"])
def test_a_line_of_an_odd_time_keeps_nobody_from_writing_the_next(tmp_path: Path, at: str) -> None:
    sample = make_sample()
    (line,) = open_store(tmp_path, "w1").record([failed(sample, attempt=1)], AT)
    (segment,) = (tmp_path / "dataset" / "manifest").iterdir()
    segment.write_bytes(replace(line, at=at).encode())
    (again,) = open_store(tmp_path, "w2").record([failed(sample, attempt=2)], AT)
    assert again == replace(line, request=str(sample.request(2)))


def test_what_is_rejected_once_it_was_tried_again_is_rejected(tmp_path: Path) -> None:
    sample = make_sample()
    store = open_store(tmp_path)
    store.record([failed(sample)], AT)
    rejected = make_record(sample.ordinal, "rejected")
    (held,) = store.record([rejected], AT)
    assert (held.status, held.reason) == ("rejected", "why")
    assert store.record([rejected], AT) == [held]
    assert store.record([failed(sample, attempt=2)], AT) == [held]
    assert len(lines_of(tmp_path / "dataset")) == 2


def test_a_wrong_row_of_a_failed_sample_is_quarantined_and_the_line_says_failed(tmp_path: Path) -> None:
    sample = make_sample()
    place = leave_row(tmp_path, sample)
    data = bytearray(place.read_bytes())
    data[-2:] = b"\xff\x7f"  # a NaN
    place.write_bytes(data)
    (held,) = open_store(tmp_path).record([failed(sample)], AT)
    assert (held.status, held.reason, held.path) == ("failed", "dump_gone", "")
    assert not place.exists()
    assert len(list((tmp_path / "dataset" / ".quarantine").iterdir())) == 2


def test_a_row_of_a_dataset_that_does_not_say_whose_it_is_stays_and_is_not_taken_over(tmp_path: Path) -> None:
    sample = make_sample()
    place = leave_row(tmp_path, sample)
    (tmp_path / "dataset" / "headrace.json").unlink()
    (held,) = open_store(tmp_path).record([failed(sample)], AT)
    assert held.status == "failed"
    assert place.exists()


def test_a_record_whose_request_is_anothers_is_a_usage_error(tmp_path: Path) -> None:
    store, sample = open_store(tmp_path), make_sample()
    with pytest.raises(UsageError, match="not a request of ordinal 7"):
        store.record([failed(sample, request=str(make_sample(8).request()))], AT)
    with pytest.raises(UsageError, match="the mask covers 3 tokens"):
        store.record([failed(sample, mask=(1, 2))], AT)
    assert lines_of(tmp_path / "dataset") == []


@pytest.fixture
def lasting(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The inodes that were made last."""
    inodes: list[int] = []
    fsync = os.fsync

    def spy(descriptor: int) -> None:
        inodes.append(os.fstat(descriptor).st_ino)
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", spy)
    return inodes


def test_a_line_that_is_found_is_made_last_before_it_is_trusted(tmp_path: Path, lasting: list[int]) -> None:
    sample = make_sample()
    store = open_store(tmp_path)
    store.store(sample.job(), sample.dump(tmp_path), AT)
    (segment,) = (tmp_path / "dataset" / "manifest").iterdir()
    for writer, action in (
        ("w2", lambda store: store.store(sample.job(), tmp_path / "gone", AT)),
        ("w3", lambda store: store.record([failed(sample)], AT)),
    ):
        lasting.clear()
        other = open_store(tmp_path, writer)
        action(other)
        assert segment.stat().st_ino in lasting
        lasting.clear()
        action(other)
        assert segment.stat().st_ino not in lasting, "it has not grown since"


def test_an_index_serves_the_next_store_also_when_the_folder_was_replaced(tmp_path: Path) -> None:
    sample, folder = make_sample(), tmp_path / "dataset"
    index = ManifestIndex(folder, 100)
    store = Store(folder, make_spec(folder), "w1", index)
    store.store(sample.job(), sample.dump(tmp_path), AT)
    store.store(sample.job(), sample.dump(tmp_path), AT)
    assert index.status(sample.ordinal) == "stored"
    store.close()
    folder.rename(tmp_path / "away")
    for writer in ("w2", "w3"):
        outcome = Store(folder, make_spec(folder), writer, index).store(sample.job(), sample.dump(tmp_path), AT)
        assert isinstance(outcome, Stored)
        assert_stored(folder, [sample])
    assert len(lines_of(folder)) == 1

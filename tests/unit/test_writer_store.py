from __future__ import annotations

import multiprocessing
from dataclasses import replace
from datetime import datetime, timedelta, timezone
from multiprocessing.connection import Connection
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any

import pytest

from headrace.errors import Conflict, Unreadable, UsageError
from headrace.manifest import Line, read_dataset
from headrace.runs import Identity
from headrace.verdicts import Reason, Refusal
from headrace_writer.dataset import ensure_dataset
from headrace_writer.destination import Destination
from headrace_writer.rows import Due, StoredRow
from headrace_writer.store import DumpGone, Outcome, Refused, Store, Stored, finish
from tests.support.dumps import ENGINE, WEIGHTS
from tests.support.stores import AT, BOUNDARIES, Sample, assert_stored, lines_of, make_sample, make_spec, row_files

SPAWN = multiprocessing.get_context("spawn")


def open_store(tmp_path: Path, writer: str = "w1", **changes: Any) -> Store:
    folder = tmp_path / "dataset"
    return Store(folder, make_spec(folder, **changes), writer)


def refusal_of(outcome: Outcome) -> Reason:
    assert isinstance(outcome, Refused), outcome
    return outcome.refusal.reason


def test_a_dump_becomes_a_row_a_line_and_a_dataset_file(tmp_path: Path) -> None:
    sample = make_sample()
    dump = sample.dump(tmp_path)
    outcome = open_store(tmp_path).store(sample.job(), dump, AT)
    assert isinstance(outcome, Stored)
    assert not outcome.adopted
    assert not outcome.already
    assert lines_of(tmp_path / "dataset") == [outcome.line]
    assert outcome.line.request == str(sample.request())
    assert (outcome.line.tokens, outcome.line.boundaries, outcome.line.proof) == (12, BOUNDARIES, "ids")
    assert_stored(tmp_path / "dataset", [sample])
    dataset = read_dataset(tmp_path / "dataset")
    assert dataset is not None
    assert dataset.identity == Identity(engine=ENGINE, weight_version=WEIGHTS)
    assert dataset.spec.digest == make_spec(tmp_path).digest
    assert dump.exists()
    finish(dump)
    finish(dump)
    assert not dump.exists()


def test_the_time_of_a_line_is_utc_in_seconds(tmp_path: Path) -> None:
    sample = make_sample()
    at = datetime(2026, 7, 23, 1, 2, 3, 999, tzinfo=timezone(timedelta(hours=2)))
    outcome = open_store(tmp_path).store(sample.job(), sample.dump(tmp_path), at)
    assert isinstance(outcome, Stored)
    assert outcome.line.at == "2026-07-22T23:02:03Z"


def test_a_stored_sample_is_already_stored_with_and_without_its_dump(tmp_path: Path) -> None:
    sample = make_sample()
    dump = sample.dump(tmp_path)
    first = open_store(tmp_path).store(sample.job(), dump, AT)
    assert isinstance(first, Stored)
    store = open_store(tmp_path, "w2")
    for _ in range(2):
        again = store.store(sample.job(attempt=1), dump, AT + timedelta(hours=1))
        assert again == Stored(line=first.line, already=True)
        finish(dump)
    assert lines_of(tmp_path / "dataset") == [first.line]


def test_a_line_whose_row_is_gone_is_not_enough(tmp_path: Path) -> None:
    sample = make_sample()
    store = open_store(tmp_path)
    first = store.store(sample.job(), sample.dump(tmp_path), AT)
    assert isinstance(first, Stored)
    (tmp_path / "dataset" / first.line.path).unlink()
    assert store.store(sample.job(), tmp_path / "gone.safetensors", AT) == DumpGone()
    again = store.store(sample.job(), sample.dump(tmp_path), AT)
    assert isinstance(again, Stored)
    assert not again.already
    assert_stored(tmp_path / "dataset", [sample])


def test_a_line_never_leads_out_of_the_place_of_its_row(tmp_path: Path) -> None:
    sample, other = make_sample(7), make_sample(8)
    store = open_store(tmp_path)
    stored = store.store(other.job(), other.dump(tmp_path), AT)
    assert isinstance(stored, Stored)
    # A line of sample 7 that names the row of sample 8.
    store._manifest.append(replace(stored.line, ordinal=7))
    outcome = store.store(sample.job(), sample.dump(tmp_path), AT)
    assert isinstance(outcome, Stored)
    assert not outcome.already
    assert_stored(tmp_path / "dataset", [sample, other])


def test_a_writer_that_stood_still_between_row_and_line_adds_none_to_that_of_the_writer_that_overtook_it(
    tmp_path: Path,
) -> None:
    sample = make_sample()
    dump = sample.dump(tmp_path)
    slow = open_store(tmp_path)
    row = slow._from_dump(sample.job(), dump)
    assert isinstance(row, StoredRow)
    other = open_store(tmp_path, "w2").store(sample.job(), dump, AT)
    assert isinstance(other, Stored)
    assert other.adopted
    due = Due(request=sample.request(), sample=sample.job().sample, mask=sample.job().mask)
    assert slow._append(due, row, AT + timedelta(hours=1)) == other.line
    assert lines_of(tmp_path / "dataset") == [other.line]


def test_a_writer_killed_between_row_and_line_is_followed_by_one_that_adopts(tmp_path: Path) -> None:
    sample = make_sample()
    dump = sample.dump(tmp_path)
    killed = open_store(tmp_path)
    assert killed._from_dump(sample.job(), dump) is not None
    dump.unlink()
    # The next job is another attempt's: the row says whose states it holds.
    outcome = open_store(tmp_path, "w2").store(sample.job(attempt=1), dump, AT)
    assert isinstance(outcome, Stored)
    assert outcome.adopted
    assert outcome.line.request == str(sample.request(attempt=0))
    assert_stored(tmp_path / "dataset", [sample])


def test_no_row_and_no_dump_is_a_dump_that_is_gone(tmp_path: Path) -> None:
    assert open_store(tmp_path).store(make_sample().job(), tmp_path / "none.safetensors", AT) == DumpGone()
    assert lines_of(tmp_path / "dataset") == []


def test_a_corrupt_dump_is_refused_and_nothing_is_published(tmp_path: Path) -> None:
    sample = make_sample()
    dump = sample.dump(tmp_path)
    good = dump.read_bytes()
    store = open_store(tmp_path)
    for position in (-1, -700):
        data = bytearray(good)
        data[position] ^= 1
        dump.write_bytes(data)
        assert refusal_of(store.store(sample.job(), dump, AT)) is Reason.CORRUPT
    assert not list((tmp_path / "dataset").glob("rows/**/*"))
    assert not (tmp_path / "dataset" / "headrace.json").exists()
    assert lines_of(tmp_path / "dataset") == []
    dump.write_bytes(good)
    assert isinstance(store.store(sample.job(), dump, AT), Stored)


def test_a_torn_dump_is_refused_as_unreadable(tmp_path: Path) -> None:
    sample = make_sample()
    dump = sample.dump(tmp_path)
    dump.write_bytes(dump.read_bytes()[:-5])
    assert refusal_of(open_store(tmp_path).store(sample.job(), dump, AT)) is Reason.UNREADABLE


def test_a_dump_is_judged_again_before_it_is_stored(tmp_path: Path) -> None:
    sample = make_sample()
    store = open_store(tmp_path)
    wrong = sample.dump(tmp_path, changes={"request": str(make_sample(8).request())})
    assert refusal_of(store.store(sample.job(), wrong, AT)) is Reason.TOKEN_CONTENT
    wrong = sample.dump(tmp_path, changes={"boundaries": (2, 4, 5)})
    assert refusal_of(store.store(sample.job(), wrong, AT)) is Reason.LAYERS
    wrong = sample.dump(tmp_path, changes={"engine": "another"})
    assert refusal_of(store.store(sample.job(), wrong, AT)) is Reason.ENGINE_CHANGED
    wrong = sample.dump(tmp_path, changes={"weight_version": "another"})
    assert refusal_of(store.store(sample.job(), wrong, AT)) is Reason.WEIGHTS_CHANGED


@pytest.mark.parametrize(
    ("field", "reason"), [("engine", Reason.ENGINE_CHANGED), ("weight_version", Reason.WEIGHTS_CHANGED)]
)
def test_the_dataset_keeps_the_engine_and_weights_of_its_first_row(tmp_path: Path, field: str, reason: Reason) -> None:
    first, second = make_sample(1), make_sample(2)
    store = open_store(tmp_path)
    store.store(first.job(), first.dump(tmp_path), AT)
    # Redis forgot the first row: job and dump agree with each other, and not with the dataset.
    changes: dict[str, Any] = {field: "new"}
    outcome = store.store(second.job(**changes), second.dump(tmp_path, changes=changes), AT)
    assert refusal_of(outcome) is reason
    assert_stored(tmp_path / "dataset", [first])
    assert isinstance(store.store(second.job(**changes), second.dump(tmp_path), AT), Stored)


def test_ensure_dataset_writes_once_and_refuses_another_identity(tmp_path: Path) -> None:
    spec, identity = make_spec(tmp_path), Identity(engine="a", weight_version="1")
    destination = Destination(tmp_path, "w1")
    first = ensure_dataset(destination, spec, identity)
    before = (tmp_path / "headrace.json").stat()
    assert ensure_dataset(destination, spec, identity) == first
    for other, reason in (
        (replace(identity, engine="b"), Reason.ENGINE_CHANGED),
        (replace(identity, weight_version="2"), Reason.WEIGHTS_CHANGED),
    ):
        refusal = ensure_dataset(destination, spec, other)
        assert isinstance(refusal, Refusal)
        assert refusal.reason is reason
    assert (tmp_path / "headrace.json").stat() == before


def test_a_folder_of_another_extraction_is_a_conflict_that_names_the_difference(tmp_path: Path) -> None:
    sample = make_sample()
    store = open_store(tmp_path)
    early = open_store(tmp_path, "w2", hidden_size=32)
    store.store(sample.job(), sample.dump(tmp_path), AT)
    with pytest.raises(Conflict, match="hidden_size: 32, not 16"):
        open_store(tmp_path, "w3", hidden_size=32)
    with pytest.raises(Conflict, match="hidden_size: 32, not 16"):
        early.store(sample.job(), sample.dump(tmp_path), AT)
    with pytest.raises(Conflict, match="hidden_size: 32, not 16"):
        early.record([], AT)
    # Where it lies and how often it is tried do not make an extraction.
    Store(tmp_path / "dataset", make_spec(tmp_path / "elsewhere", max_attempts=9), "w4")


def test_a_damaged_dataset_file_stops_the_writer(tmp_path: Path) -> None:
    (tmp_path / "dataset").mkdir()
    (tmp_path / "dataset" / "headrace.json").write_bytes(b"{")
    with pytest.raises(Unreadable, match=r"headrace\.json"):
        open_store(tmp_path)


def test_a_job_that_is_not_of_this_run_is_a_usage_error(tmp_path: Path) -> None:
    sample = make_sample()
    store = open_store(tmp_path)
    with pytest.raises(UsageError, match="the mask covers 3 tokens"):
        store.store(sample.job(mask=(1, 2)), sample.dump(tmp_path), AT)
    with pytest.raises(UsageError, match="100 samples"):
        store.store(make_sample(100).job(), tmp_path, AT)
    with pytest.raises(UsageError, match="not a request of run other"):
        Store(tmp_path / "o", make_spec(tmp_path, run="other"), "w1").store(sample.job(), tmp_path, AT)


def store_at_once(tmp_path: Path, writer: str, start: Barrier, samples: list[Sample], results: Connection) -> None:
    store = open_store(tmp_path, writer)
    for sample in samples:
        start.wait(60)
        results.send(store.store(sample.job(), tmp_path / f"{sample.request()}.safetensors", AT))


def test_processes_that_store_the_same_ordinals_at_once_make_one_row_each(tmp_path: Path) -> None:
    samples = [make_sample(ordinal, tokens=200) for ordinal in range(20)]
    for sample in samples:
        sample.dump(tmp_path)
    start = SPAWN.Barrier(2)
    pipes = [SPAWN.Pipe(duplex=False) for _ in range(2)]
    processes = [
        SPAWN.Process(target=store_at_once, args=(tmp_path, f"w{n}", start, samples, pipe[1]))
        for n, pipe in enumerate(pipes)
    ]
    for process in processes:
        process.start()
    seen: dict[int, set[Line]] = {}
    for sample in samples:
        for receiving, _ in pipes:
            assert receiving.poll(60)
            outcome = receiving.recv()
            assert isinstance(outcome, Stored), outcome
            seen.setdefault(sample.ordinal, set()).add(outcome.line)
    for process in processes:
        process.join(60)
        assert process.exitcode == 0
    assert all(len(lines) == 1 for lines in seen.values())
    assert set(lines_of(tmp_path / "dataset")) == set().union(*seen.values())
    assert_stored(tmp_path / "dataset", samples)
    assert not (tmp_path / "dataset" / ".quarantine").exists()


def store_and_tell(tmp_path: Path, samples: list[Sample], results: Connection) -> None:
    store = open_store(tmp_path, "killed")
    for sample in samples:
        store.store(sample.job(), tmp_path / f"{sample.request()}.safetensors", AT)
        results.send(sample.ordinal)


def test_a_killed_writer_loses_nothing(tmp_path: Path) -> None:
    samples = [make_sample(ordinal, tokens=200) for ordinal in range(60)]
    dumps = [sample.dump(tmp_path) for sample in samples]
    receiving, sending = SPAWN.Pipe(duplex=False)
    process = SPAWN.Process(target=store_and_tell, args=(tmp_path, samples, sending))
    process.start()
    for _ in range(3):
        assert receiving.poll(60)
        receiving.recv()
    process.kill()
    process.join(60)
    store = open_store(tmp_path, "next")
    assert not (tmp_path / "dataset" / ".tmp" / "killed").exists()
    outcomes = [store.store(sample.job(), dump, AT) for sample, dump in zip(samples, dumps, strict=True)]
    assert all(isinstance(outcome, Stored) and outcome.already for outcome in outcomes[:3])
    assert all(isinstance(outcome, Stored) for outcome in outcomes)
    assert_stored(tmp_path / "dataset", samples)
    assert len(row_files(tmp_path / "dataset")) == 60

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.errors import Unreadable
from headrace.ids import RequestId
from headrace.messages import Job, Record, RecordJob, StoreJob, decode, encode

REQUEST = str(RequestId.make("run1", 4, "aaaaaaaa", [5, 6, 7]))
STORE = StoreJob(request=REQUEST, sample="s4", job=1, mask=(1, 2), engine="e", weight_version="w")
RECORD = Record(ordinal=3, sample="s3", status="failed", reason="timeout", request="", tokens=0)
PROVABLE = Record(ordinal=4, sample="s4", status="failed", reason="no_dump", request=REQUEST, tokens=3, mask=(1, 2))
RECORDS = RecordJob(run="run1", records=(RECORD, PROVABLE))

texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
requests = st.builds(
    lambda ordinal, ids: str(RequestId.make("run1", ordinal, "abcdefgh", ids)),
    st.integers(0, 10**12 - 1),
    st.lists(st.integers(0, 9), min_size=1, max_size=9),
)
counts = st.integers(0, 1 << 40)
jobs: st.SearchStrategy[Job] = st.one_of(
    st.builds(
        StoreJob,
        request=requests,
        sample=texts,
        job=counts,
        mask=st.lists(counts, max_size=9).map(tuple),
        engine=texts,
        weight_version=texts,
        kind=st.just("store"),
        schema=st.just(1),
    ),
    st.builds(
        RecordJob,
        run=texts,
        records=st.lists(
            st.builds(
                Record,
                ordinal=counts,
                sample=texts,
                status=st.sampled_from(["failed", "rejected"]),
                reason=texts,
                request=texts,
                tokens=counts,
            ),
            max_size=4,
        ).map(tuple),
        kind=st.just("record"),
        schema=st.just(1),
    ),
)


def packed(message: Job, /, **changes: Any) -> bytes:
    data: bytes = msgpack.packb({**asdict(message), **changes})
    return data


@given(job=jobs)
def test_a_job_round_trips(job: Job) -> None:
    assert decode(encode(job)) == job


def test_a_store_job_knows_its_request() -> None:
    assert STORE.id.ordinal == 4


@pytest.mark.parametrize("job", [STORE, RECORDS])
@pytest.mark.parametrize("schema", [2, 0, -1, "1", 1.0, True, None, [1]])
def test_another_schema_is_unreadable(job: Job, schema: Any) -> None:
    with pytest.raises(Unreadable, match="schema"):
        decode(packed(job, schema=schema))


def test_a_newer_schema_says_to_upgrade_even_if_it_has_new_fields() -> None:
    with pytest.raises(Unreadable, match="upgrade"):
        decode(packed(STORE, schema=2, colour="red"))


@pytest.mark.parametrize("name", sorted(asdict(STORE)))
def test_a_missing_field_is_unreadable(name: str) -> None:
    table = asdict(STORE)
    del table[name]
    with pytest.raises(Unreadable):
        decode(msgpack.packb(table))


@pytest.mark.parametrize(
    "changes",
    [
        {"colour": "red"},
        {"kind": "delete"},
        {"kind": ["store"]},
        {"kind": {"a": 1}},
        {"kind": None},
        {"request": "req_17"},
        {"request": REQUEST + "\n"},
        {"request": b"x"},
        {"request": 7},
        {"sample": None},
        {"job": "1"},
        {"job": 1.0},
        {"job": True},
        {"mask": [1, "2"]},
        {"mask": [1, 2.5]},
        {"mask": "12"},
        {"mask": {"1": 2}},
        {"mask": None},
        {"engine": b"e"},
    ],
)
def test_an_unknown_field_or_a_wrong_type_is_unreadable(changes: dict[str, Any]) -> None:
    with pytest.raises(Unreadable):
        decode(packed(STORE, **changes))


def test_a_record_of_before_masks_is_read() -> None:
    table = asdict(RECORD)
    del table["mask"]
    assert decode(packed(RECORDS, records=[table])) == RecordJob(run="run1", records=(RECORD,))


@pytest.mark.parametrize(
    "record",
    [
        {**asdict(RECORD), "status": "stored"},
        {**asdict(RECORD), "ordinal": "3"},
        {**asdict(RECORD), "colour": "red"},
        {**asdict(PROVABLE), "request": "req_17"},
        {**asdict(PROVABLE), "mask": [1, "2"]},
        {"ordinal": 3},
        "record",
        None,
    ],
)
def test_a_wrong_record_is_unreadable(record: Any) -> None:
    with pytest.raises(Unreadable):
        decode(packed(RECORDS, records=[record]))


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xc1",
        b"\x81",
        encode(STORE)[:-3],
        encode(STORE) + b"\x00",
        b"\x91" * 100_000,
        msgpack.packb([1, 2]),
        msgpack.packb(None),
        msgpack.packb("store"),
        msgpack.packb({b"schema": 1, b"kind": b"store"}),
        msgpack.packb({"schema": 1}),
        msgpack.packb({1: 2}),
        msgpack.packb(msgpack.ExtType(5, b"x")),
    ],
)
def test_bytes_that_are_no_job_are_unreadable(data: bytes) -> None:
    with pytest.raises(Unreadable):
        decode(data)


@given(data=st.binary(max_size=60))
def test_any_bytes_are_a_job_or_unreadable(data: bytes) -> None:
    try:
        assert decode(data).schema == 1
    except Unreadable:
        pass

from __future__ import annotations

import json
import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.dumpfolder import open_nofollow, read_card, read_dump, read_lost, read_problem, read_site
from headrace.dumps import (
    ENGINE_FILE,
    PROBLEM_FILE,
    SITE_FILE,
    DumpHeader,
    EngineCard,
    EngineProblem,
    Lost,
    Stats,
    decode_metadata,
    dump_layout,
    encode_json,
)
from headrace.errors import Unreadable
from headrace.ids import RequestId, encode_ids
from headrace.tensorfile import decode_header, encode_header, layout
from tests.support.dumps import make_dump

IDS = [5, 6, 7]
REQUEST = RequestId.make("run1", 4, "aaaaaaaa", IDS)
BOUNDARIES = (2, 4, 6)
LAYERS = ("2", "4", "6", "final")
# Half a surrogate pair, which JSON can spell and no store takes, in what would be a notice and a problem.
HALF = b'{"boot": "b", "request": "r", "reason": "\\ud800", "detail": "", "problem": "\\ud800", "schema": 1}'

CARD = EngineCard(
    boot="b1",
    model="m",
    fingerprint="sglang 0.5",
    weight_version="default",
    boundaries=BOUNDARIES,
    final_state="pre_norm",
    layers=8,
    hidden_size=64,
    dtype="BF16",
    norm_file="final_norm.b1.safetensors",
)

texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
norms = st.floats(allow_nan=False)
headers = st.builds(
    DumpHeader,
    request=texts,
    tokens=st.integers(1, 9),
    boundaries=st.lists(st.integers(0, 200), max_size=4).map(tuple),
    final_state=texts,
    parts=st.integers(0, 99),
    retractions=st.integers(0, 99),
    weight_version=texts,
    model=texts,
    engine=texts,
    stats=st.lists(
        st.builds(Stats, layer=texts, not_finite=st.integers(0, 99), norm_min=norms, norm_max=norms), max_size=4
    ).map(tuple),
    checksum=st.integers(0, (1 << 64) - 1).map(lambda value: f"xxh3:{value:016x}"),
    tensors=st.just(dump_layout(9, 3, 4, "F32")),
    schema=st.just(1),
)


def metadata_of(**changes: str) -> dict[str, str]:
    header = DumpHeader(
        request=str(REQUEST),
        tokens=3,
        boundaries=BOUNDARIES,
        final_state="pre_norm",
        parts=1,
        retractions=0,
        weight_version="default",
        model="m",
        engine="e",
        stats=tuple(Stats(layer=layer, not_finite=0, norm_min=1.0, norm_max=2.0) for layer in LAYERS),
        checksum="xxh3:0123456789abcdef",
        tensors=dump_layout(3, 3, 4, "F32"),
    )
    return {**header.metadata(), **changes}


def stats_with(**changes: Any) -> str:
    return json.dumps([{"layer": "2", "not_finite": 0, "norm_min": 1.0, "norm_max": 2.0, **changes}])


@given(header=headers)
def test_a_dumps_header_round_trips_through_the_files_header(header: DumpHeader) -> None:
    head = header.encode(8192)
    tensors, metadata, offset = decode_header(head, 8192 + 9 * (8 + 4 * 4 * 4))
    assert offset == 8192
    assert decode_metadata(tensors, metadata) == header
    assert list(metadata)[-1] == "checksum"


def test_a_dump_is_read_without_its_states(tmp_path: Path) -> None:
    path = make_dump(tmp_path, REQUEST, IDS, BOUNDARIES, 16)
    dump = read_dump(path)
    assert dump.token_ids == encode_ids(IDS)
    assert dump.file_size == path.stat().st_size == dump.data_offset + 3 * (8 + 4 * 16 * 2)
    assert dump.header.request == str(REQUEST)


@pytest.mark.parametrize("name", sorted(metadata_of()))
def test_a_dump_without_one_of_its_strings_is_unreadable(name: str) -> None:
    metadata = metadata_of()
    del metadata[name]
    with pytest.raises(Unreadable):
        decode_metadata(dump_layout(3, 3, 4, "F32"), metadata)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("schema", "2"),
        ("schema", "0"),
        ("schema", "one"),
        ("tokens", "three"),
        ("tokens", "1e3"),
        ("boundaries", "2,4,6"),
        ("boundaries", "[2.5, 4, 6]"),
        ("boundaries", '["2", "4", "6"]'),
        ("boundaries", '"246"'),
        ("boundaries", "[true, 4, 6]"),
        ("boundaries", "[1e999]"),
        ("boundaries", "246"),
        ("boundaries", "null"),
        ("boundaries", "[" * 100_000),
        ("stats", "{}{}"),
        ("stats", "[1]"),
        ("stats", "[[]]"),
        ("stats", "17"),
        ("stats", stats_with(not_finite=0.5)),
        ("stats", stats_with(not_finite="0")),
        ("stats", stats_with(not_finite=1e999)),
        ("stats", stats_with(norm_min=10**400)),
        ("stats", stats_with(norm_max=None)),
        ("stats", stats_with(norm_max=[1])),
        ("checksum", "xxh3:0123456789ABCDEF"),
        ("checksum", "xxh3:0123"),
        ("checksum", "md5:0123456789abcdef"),
        ("checksum", "xxh3:0123456789abcdef\n"),
    ],
)
def test_a_dump_with_a_wrong_string_is_unreadable(name: str, value: str) -> None:
    with pytest.raises(Unreadable) as error:
        decode_metadata(dump_layout(3, 3, 4, "F32"), metadata_of(**{name: value}))
    assert len(str(error.value)) < 400


def test_a_newer_schema_says_to_upgrade() -> None:
    with pytest.raises(Unreadable, match="upgrade"):
        decode_metadata(dump_layout(3, 3, 4, "F32"), metadata_of(schema="2"))


@pytest.mark.parametrize(
    "tensors",
    [
        [("token_ids", "I64", (3,)), ("aux", "F32", (3, 12))],
        [("token_ids", "I64", (3,)), ("aux", "F32", (3, 12)), ("final", "F32", (3, 4)), ("more", "F32", (1,))],
        [("token_ids", "F32", (3,)), ("aux", "F32", (3, 12)), ("final", "F32", (3, 4))],
    ],
)
def test_a_dump_of_other_tensors_is_unreadable(tensors: list[Any]) -> None:
    with pytest.raises(Unreadable, match="token_ids"):
        decode_metadata(layout(tensors), metadata_of())


def test_a_torn_dump_is_unreadable_wherever_it_ends(tmp_path: Path) -> None:
    whole = make_dump(tmp_path, REQUEST, IDS, BOUNDARIES, 16).read_bytes()
    torn = tmp_path / "torn"
    for size in (0, 7, 8, 100, 1000, len(whole) - 1):
        torn.write_bytes(whole[:size])
        with pytest.raises(Unreadable):
            read_dump(torn)
    torn.write_bytes(whole + b"\0")
    with pytest.raises(Unreadable):
        read_dump(torn)


def test_a_sparse_dump_of_a_terabyte_costs_no_memory(tmp_path: Path) -> None:
    rows = 1 << 37
    tensors = layout([("token_ids", "I64", (rows,)), ("aux", "F32", (0, 12)), ("final", "F32", (0, 4))])
    path = tmp_path / "sparse"
    with path.open("wb") as file:
        head = encode_header(tensors, metadata_of())
        file.write(head)
        file.truncate(len(head) + 8 * rows)
    with pytest.raises(Unreadable, match="more than any context holds"):
        read_dump(path)


def test_only_regular_files_are_opened(tmp_path: Path) -> None:
    target = make_dump(tmp_path, REQUEST, IDS, BOUNDARIES, 16)
    link, fifo, folder = tmp_path / "link", tmp_path / "fifo", tmp_path / "folder"
    link.symlink_to(target)
    os.mkfifo(fifo)
    folder.mkdir()
    for path in (link, fifo, folder):
        with pytest.raises(Unreadable):
            read_dump(path)
    with pytest.raises(FileNotFoundError):
        open_nofollow(tmp_path / "gone")


def test_a_card_and_a_lost_notice_round_trip(tmp_path: Path) -> None:
    lost = Lost(request=str(REQUEST), reason="no_room", detail="12 of 20 bytes", boot="b1")
    (tmp_path / ENGINE_FILE).write_bytes(encode_json(CARD))
    (tmp_path / "x.lost.json").write_bytes(encode_json(lost))
    assert read_card(tmp_path / ENGINE_FILE) == CARD
    assert read_lost(tmp_path / "x.lost.json") == lost
    problem = EngineProblem(boot="b0", problem="LogitsProcessor.forward is not there")
    (tmp_path / PROBLEM_FILE).write_bytes(encode_json(problem))
    assert read_problem(tmp_path / PROBLEM_FILE) == problem


@pytest.mark.parametrize(
    "changes",
    [
        {"schema": 2},
        {"schema": True},
        {"schema": "1"},
        {"hidden_size": "64"},
        {"hidden_size": 64.0},
        {"layers": True},
        {"boundaries": [2, "4"]},
        {"boundaries": "246"},
        {"boundaries": None},
        {"model": None},
        {"model": ["m"]},
        {"colour": "red"},
        {"norm_file": "../elsewhere.safetensors"},
        {"norm_file": "final_norm.b2.safetensors"},
        {"norm_file": "/etc/final_norm.b1.safetensors"},
        {"boot": "../b1", "norm_file": "final_norm.../b1.safetensors"},
        {"boot": "b\0", "norm_file": "final_norm.b\0.safetensors"},
        {"boot": "", "norm_file": ""},
        {"model": "m\ud800"},
        {"fingerprint": "f" * 5000},
        {"hidden_size": 0},
        {"hidden_size": 10**30},
        {"layers": -4},
        {"boundaries": []},
        {"boundaries": [4, 2]},
        {"boundaries": [2, 2]},
        {"boundaries": [-1, 2]},
        {"boundaries": [2, 10**30]},
        {"final_state": "between"},
        {"dtype": "I64"},
        {"dtype": "\x1b[31m"},
    ],
)
def test_a_wrong_card_is_unreadable_and_named(tmp_path: Path, changes: dict[str, Any]) -> None:
    path = tmp_path / ENGINE_FILE
    path.write_text(json.dumps({**asdict(CARD), **changes}))
    with pytest.raises(Unreadable):
        read_card(path)


@pytest.mark.parametrize("data", [b"", b"[]", b"{", b"\xff", b"[" * 100_000, b"{}", b'{"schema": 1}', HALF])
def test_a_notice_that_is_none_is_unreadable(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "x.lost.json"
    path.write_bytes(data)
    with pytest.raises(Unreadable):
        read_lost(path)
    with pytest.raises(Unreadable):
        read_card(path)
    with pytest.raises(Unreadable):
        read_problem(path)


def test_a_problem_names_its_boot(tmp_path: Path) -> None:
    path = tmp_path / PROBLEM_FILE
    path.write_bytes(encode_json(EngineProblem(boot="../b0", problem="none")))
    with pytest.raises(Unreadable, match="a boot is named by"):
        read_problem(path)


def test_a_missing_field_of_a_card_is_named(tmp_path: Path) -> None:
    table = asdict(CARD)
    del table["dtype"]
    path = tmp_path / ENGINE_FILE
    path.write_text(json.dumps(table))
    with pytest.raises(Unreadable, match="dtype"):
        read_card(path)


def test_a_site_is_read_once_it_is_written(tmp_path: Path) -> None:
    assert read_site(tmp_path) is None
    (tmp_path / SITE_FILE).write_text("abc123\n")
    assert read_site(tmp_path) == "abc123"
    (tmp_path / SITE_FILE).write_text("../x")
    assert read_site(tmp_path) is None

from __future__ import annotations

import json
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.numpy import save

from headrace.errors import Unreadable
from headrace.tensorfile import ITEM_SIZE, MAX_HEADER, TensorInfo, decode_header, encode_header, layout

names = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=12).filter(lambda n: n != "__metadata__")
shapes = st.lists(st.integers(0, 5), max_size=4).map(tuple)
tensors = st.dictionaries(names, st.tuples(st.sampled_from(sorted(ITEM_SIZE)), shapes), max_size=5)
texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)


def head_of(table: Any) -> bytes:
    body = table if isinstance(table, bytes) else json.dumps(table).encode()
    return len(body).to_bytes(8, "little") + body


def data_size(tensors: Mapping[str, TensorInfo]) -> int:
    return max((info.end for info in tensors.values()), default=0)


def entry(dtype: Any = "I64", shape: Any = (2,), offsets: Any = (0, 16)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


@given(described=tensors, metadata=st.dictionaries(texts, texts, max_size=4), spare=st.integers(0, 64))
def test_a_header_round_trips_at_any_width(described: dict[str, Any], metadata: dict[str, str], spare: int) -> None:
    placed = layout([(name, dtype, shape) for name, (dtype, shape) in described.items()])
    width = len(encode_header(placed, metadata)) + spare
    head = encode_header(placed, metadata, width)
    assert len(head) == width
    assert decode_header(head, width + data_size(placed)) == (placed, metadata, width)


def test_the_library_reads_what_is_written_and_the_other_way_round(tmp_path: Path) -> None:
    placed = layout([("ids", "I64", (3,)), ("states", "F32", (3, 2)), ("none", "F32", (0, 2))])
    data = np.arange(3).tobytes() + np.ones((3, 2), "<f4").tobytes()
    path = tmp_path / "x.safetensors"
    path.write_bytes(encode_header(placed, {"a": "ü"}, 512) + data)
    with safe_open(path, "numpy") as file:
        assert file.metadata() == {"a": "ü"}
        assert file.get_tensor("ids").tolist() == [0, 1, 2]
        assert file.get_tensor("states").shape == (3, 2)

    saved = save({"empty": np.zeros((0, 4), "<f4"), "b": np.arange(4)}, metadata={"k": "v"})
    found, metadata, offset = decode_header(saved, len(saved))
    assert metadata == {"k": "v"}
    assert found["b"].shape == (4,)
    assert saved[offset + found["b"].begin : offset + found["b"].end] == np.arange(4).tobytes()


def test_a_header_that_does_not_fit_its_width_is_an_error() -> None:
    with pytest.raises(ValueError, match="does not fit 16"):
        encode_header(layout([("a", "I64", (1,))]), {}, 16)


HOSTILE: dict[str, Any] = {
    "no JSON": b"{'a': 1}",
    "not UTF-8": b'{"a\xff": 1}',
    "a list": [1, 2],
    "a number": 7,
    "a string": "abc",
    "null": None,
    "deep nesting": b"[" * 200_000,
    "deep nesting in an entry": b'{"a":' * 100_000,
    "metadata that is a list": {"__metadata__": ["a"]},
    "metadata that is no string": {"__metadata__": {"a": 1}},
    "half a surrogate pair in the metadata": b'{"__metadata__": {"a": "\\ud800"}}',
    "an entry that is a list": {"a": [1]},
    "an entry that is a string": {"a": "dtype"},
    "an entry without a shape": {"a": {"dtype": "I64", "data_offsets": [0, 16]}},
    "an unknown dtype": {"a": entry("F8_E4M3")},
    "a dtype that is a list": {"a": entry(["I64"])},
    "a negative offset": {"a": entry(offsets=(-16, 0))},
    "offsets the wrong way round": {"a": entry(offsets=(16, 0))},
    "three offsets": {"a": entry(offsets=(0, 8, 16))},
    "offsets that are floats": {"a": entry(offsets=(0.0, 16.0))},
    "offsets that are booleans": {"a": entry("U8", (1,), (False, True))},
    "a negative dimension": {"a": entry(shape=(-1, -2))},
    "a dimension of 4,000 digits": b'{"a": {"dtype": "I64", "shape": [' + b"9" * 4000 + b'], "data_offsets": [0, 16]}}',
    "a dimension of 9,000 digits": b'{"a": {"dtype": "I64", "shape": [' + b"9" * 9000 + b'], "data_offsets": [0, 16]}}',
    "100,000 dimensions": {"a": entry(shape=[1_000_003] * 100_000)},
    "a shape that the bytes do not hold": {"a": entry(shape=(3,))},
    "two tensors over each other": {"a": entry(), "b": entry(offsets=(8, 24))},
    "two tensors in one place": {"a": entry(), "b": entry()},
    "a gap": {"a": entry(), "b": entry(offsets=(24, 40))},
    "a gap at the start": {"a": entry(offsets=(8, 24))},
    "more than the file holds": {"a": entry(shape=(1 << 40,), offsets=(0, 1 << 43))},
    "nothing": b"",
    "an infinite size": b'{"a": {"dtype": "I64", "shape": [1e999], "data_offsets": [0, 16]}}',
    "a name of 500,000 characters": {"a" * 500_000: entry("I64", (3,))},
}


@pytest.mark.parametrize("what", sorted(HOSTILE))
@pytest.mark.timeout(10)
def test_a_hostile_header_is_unreadable_and_says_so_shortly(what: str) -> None:
    head = head_of(HOSTILE[what])
    with pytest.raises(Unreadable) as error:
        decode_header(head, len(head) + 16)
    assert len(str(error.value)) < 400


@pytest.mark.parametrize("length", [0, 1, 7, MAX_HEADER + 1, 1 << 62, (1 << 64) - 1])
def test_a_length_that_the_file_does_not_hold_is_unreadable(length: int) -> None:
    head = length.to_bytes(8, "little") + b"{}"
    with pytest.raises(Unreadable):
        decode_header(head, len(head))


@given(data=st.binary(max_size=64))
def test_any_bytes_are_a_header_or_unreadable(data: bytes) -> None:
    for head in (data, len(data).to_bytes(8, "little") + data):
        try:
            found, _, offset = decode_header(head, len(head))
        except Unreadable:
            continue
        assert offset + data_size(found) == len(head)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


@given(
    value=json_values,
    where=st.sampled_from(["dtype", "shape", "data_offsets", "__metadata__", "entry", "table"]),
)
def test_any_json_in_any_place_is_a_header_or_unreadable(value: Any, where: str) -> None:
    table: Any = {"a": entry()}
    match where:
        case "table":
            table = value
        case "entry":
            table["a"] = value
        case "__metadata__":
            table["__metadata__"] = value
        case _:
            table["a"][where] = value
    head = head_of(table)
    try:
        found, metadata, _ = decode_header(head, len(head) + 16)
    except Unreadable:
        return
    assert all(isinstance(text, str) for text in metadata.values())
    assert sum(ITEM_SIZE[info.dtype] * prod(info.shape) for info in found.values()) == 16

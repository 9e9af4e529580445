"""Rows of the specforge format that were damaged or made by others: refused, or read as torch reads them."""

from __future__ import annotations

import io
import json
import tempfile
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from headrace.errors import Unreadable
from headrace.ids import encode_ids
from tests.support.stores import HIDDEN
from tests.unit.test_writer_specforge import FORM, write_row


def make_row() -> bytes:
    with tempfile.TemporaryDirectory() as name:
        return write_row(Path(name)).read_bytes()


ROW = make_row()


DIRECTORY = 8 * 46 + 8 * len("row/") + 22  # the least that the directory and its end can take


@pytest.mark.parametrize("flipped", [range(len(ROW) - DIRECTORY), range(len(ROW) - DIRECTORY, len(ROW))])
@given(data=st.data(), bits=st.one_of(st.integers(1, 255), st.sampled_from([1 << bit for bit in range(8)])))
def test_a_damaged_row_is_unreadable_or_what_torch_loads(flipped: range, data: st.DataObject, bits: int) -> None:
    damaged = bytearray(ROW)
    damaged[data.draw(st.sampled_from(flipped))] ^= bits
    try:
        row = FORM.parse("row", memoryview(damaged))
    except Unreadable:
        return
    loaded = torch.load(io.BytesIO(damaged), weights_only=True)
    assert list(loaded) == ["input_ids", "loss_mask", "aux_hidden_state", "hidden_state"]
    assert encode_ids(loaded["input_ids"].tolist()) == row.token_ids
    assert bytes(loaded["loss_mask"].tolist()) == row.loss_mask
    for states, key in ((row.aux, "aux_hidden_state"), (row.final, "hidden_state")):
        assert loaded[key].view(torch.uint8).numpy().tobytes() == states.buffer.tobytes()


@pytest.mark.parametrize(("at", "bits"), [(38, 0x10), (34, 1), (8, 1), (30, 1)])
@pytest.mark.parametrize("record", range(8))
def test_a_record_that_torch_would_read_in_another_way_is_unreadable(record: int, at: int, bits: int) -> None:
    """As a folder, on another volume, encrypted, or with an extra of another length."""
    damaged = bytearray(ROW)
    place = -1
    for _ in range(record + 1):
        place = ROW.index(b"PK\1\2", place + 1)
    damaged[place + at] ^= bits
    with pytest.raises(Unreadable):
        FORM.parse("row", memoryview(damaged))


@given(length=st.integers(0, len(ROW) - 1))
def test_a_row_that_was_cut_is_unreadable(length: int) -> None:
    with pytest.raises(Unreadable):
        FORM.parse("row", memoryview(bytearray(ROW[:length])))


def test_a_row_behind_other_bytes_is_unreadable() -> None:
    with pytest.raises(Unreadable, match="not at its beginning"):
        FORM.parse("row", memoryview(b"other" + ROW))


@given(bits=st.integers(1, 255), data=st.data())
def test_the_sums_of_a_row_tell_every_change_of_its_content(data: st.DataObject, bits: int) -> None:
    FORM.check_sums("row", memoryview(ROW))
    with zipfile.ZipFile(io.BytesIO(ROW)) as archive:
        entry = data.draw(st.sampled_from(archive.infolist()))
        with archive.open(entry) as record:
            content = record.read()
    begin = ROW.index(content, entry.header_offset + 30 + len(entry.filename))
    damaged = bytearray(ROW)
    damaged[begin + data.draw(st.integers(0, len(content) - 1))] ^= bits
    with pytest.raises(Unreadable, match="its sum was made of"):
        FORM.check_sums("row", memoryview(damaged))


def rebuilt(
    change: Mapping[str, bytes],
    compression: int = zipfile.ZIP_STORED,
    *,
    before: Mapping[str, bytes] | None = None,
    after: Mapping[str, bytes] | None = None,
) -> memoryview:
    """The row's records in another archive, some with other contents, and without those whose content is empty.

    `before` and `after` are further records, by their whole names.
    """
    file = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(ROW)) as archive, zipfile.ZipFile(file, "w", compression) as other:
        for name, content in (before or {}).items():
            other.writestr(name, content)
        for name in archive.namelist():
            content = change.get(name.removeprefix("row/"), archive.read(name))
            if content:
                other.writestr(name, content)
        for name, content in (after or {}).items():
            other.writestr(name, content)
    return memoryview(file.getvalue())


def note_with(**changes: Any) -> dict[str, bytes]:
    with zipfile.ZipFile(io.BytesIO(ROW)) as archive:
        note = json.loads(archive.read("row/headrace.json")) | changes
    return {"headrace.json": json.dumps({key: value for key, value in note.items() if value is not None}).encode()}


def test_an_archive_that_holds_the_same_is_the_same_row() -> None:
    assert FORM.parse("row", rebuilt({})).token_ids == FORM.parse("row", memoryview(ROW)).token_ids


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"headrace.json": b""}, "holds no headrace.json"),
        ({"headrace.json": b"{"}, "not JSON"),
        ({"headrace.json": b"[]"}, "not an object of strings"),
        ({"headrace.json": b'{"schema": 1}'}, "not an object of strings"),
        ({"headrace.json": b" " * (2 << 20)}, "too many"),
        (note_with(schema="2"), "newer"),
        (note_with(ordinal="x"), "metadata"),
        (note_with(engine=None), "metadata"),
        (note_with(tokens=None), "tokens"),
        (note_with(tokens="0"), "says 0 tokens"),
        (note_with(tokens="11"), "data.pkl is not that of input_ids"),
        (note_with(tokens="012"), "not a whole number"),
        (note_with(tokens="²"), "not a whole number"),
        (note_with(tokens="1" + "0" * 17), "do not hold input_ids"),
        (note_with(tokens="1" + "0" * 19), "not a whole number"),
        (note_with(tokens="1" + "0" * 20), "not a whole number"),
        (note_with(hidden_size="1" + "0" * 17), "do not hold input_ids"),
        (note_with(hidden_size="9" * 30), "not a whole number"),
        (note_with(sample="\ud800"), "not JSON"),
        (note_with(boundaries="[]"), "data.pkl is not that of"),
        (note_with(boundaries="[Infinity]"), "not a list of whole numbers"),
        (note_with(boundaries='"246"'), "not a list of whole numbers"),
        (note_with(boundaries="[2.5, 4, 6]"), "not a list of whole numbers"),
        (note_with(dtype="F16"), "data.pkl is not that of"),
        (note_with(dtype="I64"), "I64"),
        (note_with(boundaries="[2, 4]"), "data.pkl is not that of"),
        ({"data.pkl": b"cos\nsystem\n(X\x04\x00\x00\x00truetR."}, "data.pkl is not that of"),
        ({"version": b"4\n"}, "version is not that of"),
        ({"byteorder": b"big"}, "byteorder is not that of"),
        ({"data/2": b""}, "holds no data/2"),
        ({"data/2": b"short"}, "aux_hidden_state takes 1152 bytes, the file holds 5"),
        ({"data/1": bytes([2]) * 96}, "loss_mask holds values other than 0 and 1"),
    ],
)
def test_another_record_is_unreadable(change: dict[str, bytes], says: str) -> None:
    with pytest.raises(Unreadable, match=says):
        FORM.parse("row", rebuilt(change))


@pytest.mark.parametrize(
    "name",
    [
        "row/DATA/2",
        "row/Data.pkl",
        "row/constants.pkl",
        "row/.format_version",
        "row/data/4",
        "row/data/2\\",
        "row/other",
        "other/data/2",
        "other",
    ],
)
@pytest.mark.parametrize("first", [True, False])
def test_an_archive_with_a_record_more_is_unreadable(name: str, first: bool) -> None:
    """Torch would take `DATA/2` for `data/2`, and refuse what looks like TorchScript's."""
    more = {name: bytes(3 * 12 * HIDDEN * 2)}
    with pytest.raises(Unreadable, match="besides what belongs there"):
        FORM.parse("row", rebuilt({}, before=more if first else None, after=None if first else more))


def test_a_record_whose_name_goes_on_after_a_nul_is_another_one() -> None:
    data = bytearray(rebuilt({}, after={"row/data/2_x": bytes(9)}).tobytes().replace(b"data/2_x", b"data/2\0x"))
    with pytest.raises(Unreadable, match="besides what belongs there"):
        FORM.parse("row", memoryview(data))


def test_a_compressed_archive_is_unreadable() -> None:
    with pytest.raises(Unreadable, match="compressed"):
        FORM.parse("row", rebuilt({}, zipfile.ZIP_DEFLATED))


def test_a_record_that_is_there_twice_is_unreadable() -> None:
    file = io.BytesIO(ROW)
    with zipfile.ZipFile(file, "a") as archive, pytest.warns(UserWarning, match="Duplicate"):
        archive.writestr("row/data/3", bytes(12 * HIDDEN * 2))
    with pytest.raises(Unreadable, match="twice"):
        FORM.parse("row", memoryview(file.getvalue()))


def test_what_torch_itself_saved_is_no_row_of_ours(tmp_path: Path) -> None:
    torch.save({"input_ids": torch.arange(3)}, tmp_path / "other.ckpt")
    with pytest.raises(Unreadable, match=r"headrace\.json"):
        FORM.read(tmp_path / "other.ckpt")

from __future__ import annotations

from dataclasses import replace
from pathlib import Path, PurePosixPath

import numpy as np
import pytest

from headrace.dumps import POST_NORM, PRE_NORM
from headrace.errors import Unreadable, UsageError
from headrace.formats import FORMATS
from headrace.ids import encode_ids
from headrace.masks import decode_mask
from headrace.tensorfile import MAX_HEADER, TensorInfo, decode_header, encode_header
from headrace_writer import formats
from headrace_writer.destination import HashingFile
from headrace_writer.formats.base import as_float32
from tests.support.dumps import ENGINE, WEIGHTS, random_states
from tests.support.stores import BOUNDARIES, HIDDEN, RUN, Sample, make_sample, row_source

FORM = formats.get("headrace")


def write_row(folder: Path, sample: Sample, dtype: str = "BF16") -> Path:
    path = folder / "row.safetensors"
    with HashingFile(path) as file:
        FORM.write(row_source(folder, sample, dtype=dtype), file)
    return path


def rewrite(path: Path, tensors: dict[str, TensorInfo] | None = None, **metadata: str) -> None:
    data = path.read_bytes()
    found, strings, offset = decode_header(data[: MAX_HEADER + 8], len(data))
    path.write_bytes(encode_header(tensors or found, {**strings, **metadata}) + data[offset:])


def test_a_format_is_found_by_its_name() -> None:
    assert formats.names() == tuple(sorted(formats.names()))
    assert all(formats.get(name).name == name for name in formats.names())


def test_what_a_submit_knows_of_formats_is_what_the_writer_has() -> None:
    assert set(FORMATS) == set(formats.names())
    assert all(needs.takes and needs.takes <= {PRE_NORM, POST_NORM} for needs in FORMATS.values())


def test_an_unknown_format_is_a_usage_error_with_the_nearest_name() -> None:
    with pytest.raises(UsageError, match="did you mean 'headrace'"):
        formats.get("headrase")
    with pytest.raises(UsageError, match=r"choose one of .*headrace"):
        formats.get("xyz")


def test_the_place_of_a_row_follows_from_its_ordinal() -> None:
    assert FORM.path(0) == PurePosixPath("rows/000000/000000000.safetensors")
    assert FORM.path(1_234_567) == PurePosixPath("rows/001234/001234567.safetensors")


@pytest.mark.parametrize("dtype", ["BF16", "F16", "F32"])
def test_a_row_reads_back_as_it_was_written(tmp_path: Path, dtype: str) -> None:
    sample = make_sample()
    row = FORM.read(write_row(tmp_path, sample, dtype))
    assert row.token_ids == encode_ids(sample.token_ids)
    assert row.loss_mask == decode_mask(sample.mask)
    assert (row.aux.info.dtype, row.final.info.dtype) == (dtype, dtype)
    assert row.aux.info.shape == (12, len(BOUNDARIES) * HIDDEN)
    assert row.aux.buffer.tobytes() == random_states(row.aux.info.shape, dtype, 0).tobytes()
    assert row.final.buffer.tobytes() == random_states(row.final.info.shape, dtype, 1).tobytes()
    assert row.origin is not None
    assert (row.origin.run, row.origin.ordinal, row.origin.sample) == (RUN, sample.ordinal, sample.name)
    assert (row.origin.request, row.origin.boundaries) == (str(sample.request()), BOUNDARIES)
    assert (row.origin.engine, row.origin.weight_version, row.origin.final_state) == (ENGINE, WEIGHTS, "pre_norm")


@pytest.mark.parametrize("dtype", ["BF16", "F16", "F32"])
def test_the_safetensors_library_loads_a_row(tmp_path: Path, dtype: str) -> None:
    torch = pytest.importorskip("torch")
    from safetensors import safe_open
    from safetensors.torch import load_file

    sample = make_sample()
    path = write_row(tmp_path, sample, dtype)
    tensors = load_file(path)
    assert tensors["token_ids"].tolist() == list(sample.token_ids)
    assert tensors["loss_mask"].tolist() == list(decode_mask(sample.mask))
    assert tensors["aux"].dtype == {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}[dtype]
    row = FORM.read(path)
    for name, states in (("aux", row.aux), ("final", row.final)):
        ours = torch.from_numpy(as_float32(states.info, states.buffer))
        assert torch.equal(tensors[name].float(), ours)
        raw = torch.frombuffer(states.buffer, dtype=tensors[name].dtype).reshape(states.info.shape)
        assert torch.equal(tensors[name], raw)
    with safe_open(path, "pt") as file:
        assert file.metadata()["sample"] == sample.name


def test_a_map_of_a_row_never_changes_the_file(tmp_path: Path) -> None:
    path = write_row(tmp_path, make_sample())
    before = path.read_bytes()
    row = FORM.read(path)
    row.aux.buffer[:4] = b"\0\0\0\0"
    assert path.read_bytes() == before


def test_only_hidden_states_become_float32() -> None:
    info = TensorInfo(dtype="I64", shape=(1,), begin=0, end=8)
    with pytest.raises(ValueError, match="I64"):
        as_float32(info, memoryview(bytes(8)))


def test_a_torn_row_is_unreadable(tmp_path: Path) -> None:
    path = write_row(tmp_path, make_sample())
    data = path.read_bytes()
    for length in (0, 7, 100, len(data) - 1):
        path.write_bytes(data[:length])
        with pytest.raises(Unreadable):
            FORM.read(path)


def test_a_row_behind_a_link_is_unreadable_and_a_missing_one_is_missing(tmp_path: Path) -> None:
    path = write_row(tmp_path, make_sample())
    link = tmp_path / "link.safetensors"
    link.symlink_to(path)
    with pytest.raises(Unreadable):
        FORM.read(link)
    with pytest.raises(FileNotFoundError):
        FORM.read(tmp_path / "none.safetensors")


def test_a_row_of_a_newer_schema_says_so(tmp_path: Path) -> None:
    path = write_row(tmp_path, make_sample())
    rewrite(path, schema="2")
    with pytest.raises(Unreadable, match="newer"):
        FORM.read(path)


BROKEN = [
    {"ordinal": "x"},
    {"ordinal": "07"},
    {"ordinal": "٧"},
    {"ordinal": "9" * 30},
    {"schema": " 1"},
    {"boundaries": "7"},
    {"boundaries": "["},
    {"boundaries": '"246"'},
    {"boundaries": '{"2": 4}'},
    {"boundaries": "[2.5, 4, 6]"},
    {"boundaries": "[true, 4, 6]"},
    {"boundaries": "[Infinity]"},
    {"boundaries": "[1e400]"},
]


@pytest.mark.parametrize("metadata", BROKEN)
def test_a_row_with_broken_metadata_is_unreadable(tmp_path: Path, metadata: dict[str, str]) -> None:
    path = write_row(tmp_path, make_sample())
    rewrite(path, None, **metadata)
    with pytest.raises(Unreadable, match="metadata"):
        FORM.read(path)


def test_a_row_with_other_tensors_or_types_is_unreadable(tmp_path: Path) -> None:
    path = write_row(tmp_path, make_sample())
    data = path.read_bytes()
    tensors, _, _ = decode_header(data[: MAX_HEADER + 8], len(data))
    renamed = {("states" if name == "aux" else name): info for name, info in tensors.items()}
    rewrite(path, renamed)
    with pytest.raises(Unreadable, match="states"):
        FORM.read(path)
    flat = replace(tensors["aux"], shape=(tensors["aux"].nbytes // 2,))
    rewrite(path, {**tensors, "aux": flat})
    with pytest.raises(Unreadable, match="aux is BF16"):
        FORM.read(path)


def test_a_loss_mask_of_other_values_is_unreadable(tmp_path: Path) -> None:
    path = write_row(tmp_path, make_sample())
    data = bytearray(path.read_bytes())
    tensors, _, offset = decode_header(bytes(data), len(data))
    begin = offset + tensors["loss_mask"].begin
    data[begin : begin + 8] = np.int64(2).tobytes()
    path.write_bytes(data)
    with pytest.raises(Unreadable, match="loss_mask"):
        FORM.read(path)

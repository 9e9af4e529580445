"""The specforge format: what torch loads from its rows, and how they read back."""

from __future__ import annotations

import json
import pickletools
import tempfile
import tracemalloc
import zipfile
from dataclasses import replace
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from headrace.dumps import POST_NORM, PRE_NORM
from headrace.finalnorm import FinalNorm
from headrace.ids import encode_ids
from headrace.masks import decode_mask
from headrace_writer import formats
from headrace_writer.destination import Destination, DestinationFull, HashingFile
from headrace_writer.formats import rmsnorm, torchfile
from headrace_writer.formats.base import NotFinite, RowSource, as_float32
from tests.support.dumps import ENGINE, WEIGHTS, make_norm, random_states
from tests.support.filesystems import fill, small_tmpfs
from tests.support.stores import BOUNDARIES, HIDDEN, RUN, make_sample, row_source

FORM = formats.get("specforge")
DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}


def source_of(folder: Path, *, tokens: int = 12, dtype: str = "BF16", captured: str = PRE_NORM) -> RowSource:
    norm = make_norm(HIDDEN, dtype)
    return row_source(folder, make_sample(tokens=tokens), norm, dtype=dtype, changes={"final_state": captured})


def write_row(folder: Path, source: RowSource | None = None) -> Path:
    path = folder / "data_7.ckpt"
    with HashingFile(path) as file:
        FORM.write(source or source_of(folder), file)
    return path


def normed_by_transformers(norm: FinalNorm, rows: torch.Tensor) -> torch.Tensor:
    """What the model's own module says of states [N, D], all at once."""
    module = LlamaRMSNorm(norm.hidden_size, norm.eps).to(DTYPES[norm.dtype])
    with torch.no_grad():
        module.weight.copy_(torch.frombuffer(bytearray(norm.weight), dtype=DTYPES[norm.dtype]))
        normed: torch.Tensor = module(rows[None])
    return normed[0]


def tensor(states: Any, dtype: str) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(states).view(np.int8)).view(DTYPES[dtype])


def test_the_place_of_a_row_follows_from_its_ordinal() -> None:
    assert FORM.path(0) == PurePosixPath("rows/rows_0-2000/data_0.ckpt")
    assert FORM.path(1999) == PurePosixPath("rows/rows_0-2000/data_1999.ckpt")
    assert FORM.path(1_234_567) == PurePosixPath("rows/rows_1234000-1236000/data_1234567.ckpt")


@pytest.mark.parametrize("mmap", [True, False])
@pytest.mark.parametrize("weights_only", [True, False])
@pytest.mark.parametrize("captured", [PRE_NORM, POST_NORM])
@given(dtype=st.sampled_from(sorted(DTYPES)), tokens=st.integers(1, 70))
def test_torch_loads_the_record_of_specforge(
    dtype: str, tokens: int, captured: str, weights_only: bool, mmap: bool
) -> None:
    with tempfile.TemporaryDirectory() as name:
        source = source_of(Path(name), tokens=tokens, dtype=dtype, captured=captured)
        path = write_row(Path(name), source)
        loaded = torch.load(path, weights_only=weights_only, mmap=mmap)
        assert list(loaded) == ["input_ids", "loss_mask", "aux_hidden_state", "hidden_state"]
        assert {key: (value.dtype, tuple(value.shape)) for key, value in loaded.items()} == {
            "input_ids": (torch.int64, (tokens,)),
            "loss_mask": (torch.int64, (tokens,)),
            "aux_hidden_state": (DTYPES[dtype], (1, tokens, 3 * HIDDEN)),
            "hidden_state": (DTYPES[dtype], (1, tokens, HIDDEN)),
        }
        assert all(value.is_contiguous() and value.data_ptr() % 64 == 0 for value in loaded.values()) or not mmap
        assert loaded["input_ids"].tolist() == list(make_sample(tokens=tokens).token_ids)
        assert loaded["loss_mask"].tolist() == list(decode_mask(source.mask))
        aux, final = (random_states((tokens, width), dtype, seed) for width, seed in ((3 * HIDDEN, 0), (HIDDEN, 1)))
        assert torch.equal(loaded["aux_hidden_state"][0], tensor(aux, dtype))
        expected = tensor(final, dtype)
        if captured == PRE_NORM:
            assert source.norm is not None
            expected = normed_by_transformers(source.norm, expected)
        assert torch.equal(loaded["hidden_state"][0], expected)


@pytest.mark.parametrize("captured", [PRE_NORM, POST_NORM])
@given(dtype=st.sampled_from(sorted(DTYPES)), tokens=st.integers(1, 40))
def test_a_row_reads_back_as_it_was_written(dtype: str, tokens: int, captured: str) -> None:
    with tempfile.TemporaryDirectory() as name:
        path = write_row(Path(name), source_of(Path(name), tokens=tokens, dtype=dtype, captured=captured))
        row = FORM.read(path)
        sample = make_sample(tokens=tokens)
        assert row.token_ids == encode_ids(sample.token_ids)
        assert row.loss_mask == decode_mask(sample.mask)
        assert (row.aux.info.dtype, row.aux.info.shape) == (dtype, (tokens, 3 * HIDDEN))
        assert (row.final.info.dtype, row.final.info.shape) == (dtype, (tokens, HIDDEN))
        loaded = torch.load(path, weights_only=True)
        for states, key in ((row.aux, "aux_hidden_state"), (row.final, "hidden_state")):
            assert torch.equal(torch.from_numpy(as_float32(states.info, states.buffer)), loaded[key][0].float())
        assert row.origin is not None
        assert (row.origin.run, row.origin.ordinal, row.origin.sample) == (RUN, sample.ordinal, sample.name)
        assert (row.origin.request, row.origin.boundaries) == (str(sample.request()), BOUNDARIES)
        assert (row.origin.engine, row.origin.weight_version) == (ENGINE, WEIGHTS)
        assert row.origin.final_state == POST_NORM


@pytest.mark.parametrize("rows", [1, 2, 3, 1000])
@given(
    dtype=st.sampled_from(sorted(DTYPES)),
    weight=st.sampled_from(sorted(DTYPES)),
    tokens=st.integers(1, 20),
    width=st.integers(1, 200),
    scale=st.floats(1e-3, 1e3),
    seed=st.integers(0, 99),
)
def test_post_norm_is_the_models_own_bit_for_bit_whatever_the_chunks(
    rows: int, dtype: str, weight: str, tokens: int, width: int, scale: float, seed: int
) -> None:
    norm = make_norm(width, weight, seed)
    states = (torch.randn(tokens, width, generator=torch.Generator().manual_seed(seed)) * scale).to(DTYPES[dtype])
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory() as name:
        patch.setattr(rmsnorm, "_CHUNK", rows * width * DTYPES[dtype].itemsize)
        sample = make_sample(tokens=tokens)
        final = states.view(torch.int8).numpy()
        source = row_source(Path(name), sample, norm, dtype=dtype)
        info = replace(source.final.info, shape=(tokens, width))
        pieces = list(rmsnorm.normalise(norm, replace(source.final, info=info, buffer=final.reshape(-1).data)))
    found = torch.frombuffer(bytearray(b"".join(pieces)), dtype=DTYPES[dtype]).reshape(tokens, width)
    assert torch.equal(found, normed_by_transformers(norm, states).to(DTYPES[dtype]))


def test_a_norm_that_gives_no_number_is_no_row(tmp_path: Path) -> None:
    norm = FinalNorm(dtype="F16", hidden_size=HIDDEN, weight=np.full(HIDDEN, 65504, "<f2").tobytes(), eps=1e-5)
    source = replace(source_of(tmp_path, dtype="F16"), norm=norm)
    with pytest.raises(NotFinite, match="tokens 0 and later"):
        write_row(tmp_path, source)


def test_a_row_is_written_and_read_in_bounded_memory(tmp_path: Path) -> None:
    tokens = 300_000  # 38 MB of states, 9.6 MB of which are derived
    source = source_of(tmp_path, tokens=tokens)
    write_row(tmp_path, replace(source, norm=None, header=replace(source.header, final_state=POST_NORM))).unlink()
    tracemalloc.start()
    try:
        path = write_row(tmp_path, source)
        written = tracemalloc.get_traced_memory()[1]
        tracemalloc.reset_peak()
        row = FORM.read(path)
        read = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert row.final.info.nbytes == tokens * HIDDEN * 2
    # Two int64 columns of ids and mask are small beside the states of any real model; here they are 2.4 MB each.
    assert written < 12e6
    assert read < 16e6


def test_a_large_record_has_64_bit_sizes_and_is_loaded_and_read_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torchfile, "_ZIP64_FROM", 100)
    path = write_row(tmp_path)
    loaded = torch.load(path, weights_only=True, mmap=True)
    assert all(value.data_ptr() % 64 == 0 for value in loaded.values())
    row = FORM.read(path)
    assert (
        loaded["aux_hidden_state"].float().flatten().tolist()
        == as_float32(row.aux.info, row.aux.buffer).flatten().tolist()
    )


@given(number=st.one_of(st.integers(0, 1 << 10), st.integers((1 << 31) - 2, (1 << 31) + 2), st.integers(0, 1 << 50)))
def test_whole_numbers_of_any_size_are_pickled(number: int) -> None:
    operations = list(pickletools.genops(torchfile._whole(number) + b"."))
    assert [argument for _, argument, _ in operations] == [number, None]


def test_a_zip_tool_finds_the_origin_and_every_sum_right(tmp_path: Path) -> None:
    with zipfile.ZipFile(write_row(tmp_path)) as archive:
        assert archive.testzip() is None
        note = json.loads(archive.read("row/headrace.json"))
    assert (note["sample"], note["final_state"], note["captured"]) == (make_sample().name, POST_NORM, PRE_NORM)


def test_a_full_folder_while_a_row_is_written_is_told_as_such(tmp_path: Path) -> None:
    with small_tmpfs(tmp_path / "small", 1024) as folder:
        destination = Destination(folder, "w1")
        source = source_of(tmp_path, tokens=4000)
        fill(folder, leave=64 << 10)
        with pytest.raises(DestinationFull):
            destination.publish(FORM.path(7), lambda file: FORM.write(source, file))
        assert [path.name for path in (folder / ".tmp" / "w1").iterdir()] == ["lock"]

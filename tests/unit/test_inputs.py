"""Inputs: whole or absent on disk, read back as they were written, damage always noticed."""

from __future__ import annotations

import fcntl
import json
import resource
import struct
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.errors import Unavailable, Unreadable, UsageError
from headrace.masks import decode_mask, encode_mask
from headrace.runs import RunSpec
from headrace_dispatcher.inputs import Inputs, RejectedSample, Sample
from headrace_dispatcher.inputs_writer import InputsWriter, remove_stale
from tests.support.bus_values import make_spec

Entry = Sample | RejectedSample
TEXT = st.text(st.characters(codec="utf-8"), max_size=20)


def _spec(output: Path, total: int) -> RunSpec:
    return make_spec(run="demo", total=total, output=str(output))


def _write(output: Path, entries: Sequence[Entry]) -> RunSpec:
    spec = _spec(output, len(entries))
    with InputsWriter(output) as writer:
        for entry in entries:
            writer.add(entry)
        assert writer.publish(spec)
    return spec


def _sample(ordinal: int, tokens: int = 4) -> Sample:
    return Sample(ordinal=ordinal, sample=f"s{ordinal}", ids=tuple(range(tokens)), mask=(1, tokens - 1))


@st.composite
def _entries(draw: st.DrawFn) -> list[Entry]:
    entries: list[Entry] = []
    for ordinal in range(draw(st.integers(1, 8))):
        name = draw(TEXT)
        if draw(st.booleans()):
            bits = draw(st.lists(st.integers(0, 1), min_size=1, max_size=20))
            ids = tuple(draw(st.lists(st.integers(0, 2**31), min_size=len(bits), max_size=len(bits))))
            entries.append(Sample(ordinal=ordinal, sample=name, ids=ids, mask=encode_mask(bits)))
        else:
            entries.append(RejectedSample(ordinal=ordinal, sample=name, reason=draw(TEXT), detail=draw(TEXT)))
    return entries


@given(_entries())
def test_what_is_read_is_what_was_written(entries: list[Entry]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "out"
        spec = _write(output, entries)
        with Inputs.open(output) as inputs:
            assert inputs.spec == spec
            assert len(inputs) == len(entries)
            assert [inputs[ordinal] for ordinal in reversed(range(len(entries)))] == entries[::-1]
            rejected = [entry.reason for entry in entries if isinstance(entry, RejectedSample)]
            assert sorted(inputs.rejected().elements()) == sorted(rejected)


@given(st.lists(st.integers(0, 1)))
def test_a_mask_survives_its_run_lengths(bits: list[int]) -> None:
    lengths = encode_mask(bits)
    assert list(decode_mask(lengths)) == bits
    assert all(length > 0 for length in lengths[1:])


def test_the_files_are_the_documented_ones(tmp_path: Path) -> None:
    spec = _write(tmp_path, [_sample(0), RejectedSample(ordinal=1, sample="x", reason="empty", detail="why")])
    folder = tmp_path / "inputs"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["inputs"]
    lines = (folder / "samples.jsonl").read_bytes().splitlines(keepends=True)
    assert [json.loads(line) for line in lines] == [
        {"ordinal": 0, "sample": "s0", "ids": [0, 1, 2, 3], "mask": [1, 3]},
        {"ordinal": 1, "sample": "x", "rejected": "empty", "detail": "why"},
    ]
    offsets = struct.unpack("<3Q", (folder / "samples.idx").read_bytes())
    assert offsets == (0, len(lines[0]), len(lines[0]) + len(lines[1]))
    assert RunSpec.decode((folder / "run.json").read_bytes()) == spec


@pytest.mark.parametrize("ordinal", [-1, 2, 10**12])
def test_an_ordinal_outside_is_an_index_error(tmp_path: Path, ordinal: int) -> None:
    _write(tmp_path, [_sample(0), _sample(1)])
    with Inputs.open(tmp_path) as inputs, pytest.raises(IndexError, match="of 2 samples"):
        inputs[ordinal]


def test_threads_may_read_at_once(tmp_path: Path) -> None:
    entries = [_sample(ordinal, tokens=2 + ordinal) for ordinal in range(200)]
    _write(tmp_path, entries)
    with Inputs.open(tmp_path) as inputs, ThreadPoolExecutor(8) as pool:
        assert list(pool.map(inputs.__getitem__, [*range(200)] * 5)) == entries * 5


def test_nothing_is_seen_before_it_is_published_and_nothing_stays_without_it(tmp_path: Path) -> None:
    output = tmp_path / "out"
    with InputsWriter(output) as writer:
        writer.add(_sample(0))
        assert not (output / "inputs").exists()
    assert list(tmp_path.iterdir()) == []


def test_folders_above_that_were_made_for_it_go_too_and_no_others(tmp_path: Path) -> None:
    with InputsWriter(tmp_path / "new" / "deep" / "out"):
        assert (tmp_path / "new" / "deep" / "out").is_dir()
    assert list(tmp_path.iterdir()) == []
    with InputsWriter(tmp_path / "new" / "deep" / "out"):
        (tmp_path / "new" / "of another").touch()
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["of another"]


def test_a_folder_that_was_there_stays_when_writing_fails(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt), InputsWriter(tmp_path) as writer:
        writer.add(_sample(0))
        raise KeyboardInterrupt
    assert tmp_path.is_dir()
    assert list(tmp_path.iterdir()) == []


def test_the_second_of_two_writers_does_not_replace_the_first(tmp_path: Path) -> None:
    with InputsWriter(tmp_path) as late:
        late.add(_sample(0, tokens=9))
        _write(tmp_path, [_sample(0)])
        assert not late.publish(_spec(tmp_path, 1))
    with Inputs.open(tmp_path) as inputs:
        assert inputs[0] == _sample(0)
    assert [path.name for path in tmp_path.iterdir()] == ["inputs"]


def test_stale_folders_go_and_those_being_written_stay(tmp_path: Path) -> None:
    for name in (".inputs-dead", ".inputs-empty"):
        (tmp_path / name).mkdir()
    (tmp_path / ".inputs-dead" / "samples.jsonl").write_bytes(b"half")
    with InputsWriter(tmp_path) as writer:
        writer.add(_sample(0))
        remove_stale(tmp_path)
        assert len(list(tmp_path.iterdir())) == 1
        assert writer.publish(_spec(tmp_path, 1))


def test_entries_must_come_in_order_and_be_as_many_as_the_spec_says(tmp_path: Path) -> None:
    with InputsWriter(tmp_path) as writer:
        with pytest.raises(ValueError, match="ordinal 1 in the place of 0"):
            writer.add(_sample(1))
        writer.add(_sample(0))
        with pytest.raises(ValueError, match="2 samples, but 1 entries"):
            writer.publish(_spec(tmp_path, 2))


def test_an_output_below_a_file_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match=r"file/out cannot be written: .*choose another output"):
        InputsWriter(tmp_path / "file" / "out")


def test_a_disk_that_fills_leaves_nothing_behind(tmp_path: Path) -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, before[1]))
    try:
        with pytest.raises(UsageError, match="cannot be written"), InputsWriter(tmp_path / "out") as writer:
            for ordinal in range(1000):
                writer.add(_sample(ordinal, tokens=1000))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert list(tmp_path.iterdir()) == []


def test_missing_inputs_say_to_submit(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="holds no inputs of a run; submit the run file first"):
        Inputs.open(tmp_path / "nowhere")


@pytest.mark.parametrize("name", ["samples.jsonl", "samples.idx"])
def test_a_missing_file_is_damage(tmp_path: Path, name: str) -> None:
    _write(tmp_path, [_sample(0)])
    (tmp_path / "inputs" / name).unlink()
    with pytest.raises(Unreadable, match=f"{name} is missing"):
        Inputs.open(tmp_path)


def test_inputs_that_cannot_be_read_now_are_unavailable(tmp_path: Path) -> None:
    _write(tmp_path, [_sample(0)])
    (tmp_path / "inputs" / "samples.jsonl").unlink()
    (tmp_path / "inputs" / "samples.jsonl").mkdir()
    with pytest.raises(Unavailable, match="cannot be read: Is a directory"):
        Inputs.open(tmp_path)


def test_a_read_after_closing_never_reaches_another_file(tmp_path: Path) -> None:
    _write(tmp_path, [_sample(0)])
    inputs = Inputs.open(tmp_path)
    inputs.close()
    with pytest.raises(ValueError, match="closed file"):
        inputs[0]


def test_a_newer_schema_says_to_upgrade(tmp_path: Path) -> None:
    _write(tmp_path, [_sample(0)])
    path = tmp_path / "inputs" / "run.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"schema": 99}))
    with pytest.raises(Unreadable, match=r"run\.json: .*schema 99 is newer than 1; upgrade"):
        Inputs.open(tmp_path)


def test_a_damaged_spec_is_named(tmp_path: Path) -> None:
    _write(tmp_path, [_sample(0)])
    (tmp_path / "inputs" / "run.json").write_text("{")
    with pytest.raises(Unreadable, match=r"run\.json"):
        Inputs.open(tmp_path)


@pytest.mark.parametrize("cut", [1, 8])
def test_a_cut_index_is_damage(tmp_path: Path, cut: int) -> None:
    _write(tmp_path, [_sample(0), _sample(1)])
    path = tmp_path / "inputs" / "samples.idx"
    path.write_bytes(path.read_bytes()[:-cut])
    with pytest.raises(Unreadable, match="is damaged: the index has"):
        Inputs.open(tmp_path)


def test_cut_samples_are_damage(tmp_path: Path) -> None:
    _write(tmp_path, [_sample(0), _sample(1)])
    path = tmp_path / "inputs" / "samples.jsonl"
    path.write_bytes(path.read_bytes()[:-3])
    with pytest.raises(Unreadable, match="does not end where the samples end"):
        Inputs.open(tmp_path)


@pytest.mark.parametrize("middle", [0, 5, 10**6])
def test_an_index_that_points_elsewhere_is_damage(tmp_path: Path, middle: int) -> None:
    _write(tmp_path, [_sample(0), _sample(1)])
    path = tmp_path / "inputs" / "samples.idx"
    first, _, last = struct.unpack("<3Q", path.read_bytes())
    path.write_bytes(struct.pack("<3Q", first, middle, last))
    with Inputs.open(tmp_path) as inputs, pytest.raises(Unreadable, match="is damaged: entry 0"):
        inputs[0]


@pytest.mark.parametrize(
    "line",
    [
        b'{"ordinal":1,"sample":"s0","ids":[0],"mask":[1]}',
        b'{"ordinal":0,"sample":"s0","ids":[0,1],"mask":[1]}',
        b'{"ordinal":0,"sample":"s0","ids":[],"mask":[]}',
        b'{"ordinal":0,"sample":"s0","ids":[0]}',
        b'{"ordinal":0,"sample":"s0","rejected":"empty"}',
        b'{"ordinal":0,"sample":"s0","ids":3,"mask":[1]}',
        b'{"ordinal":0,"sample":"s0","ids":[0],"mask":["a"]}',
        b"[0]",
        b"torn",
    ],
)
def test_an_entry_that_is_not_its_own_is_damage(tmp_path: Path, line: bytes) -> None:
    _write(tmp_path, [_sample(0)])
    folder = tmp_path / "inputs"
    (folder / "samples.jsonl").write_bytes(line + b"\n")
    (folder / "samples.idx").write_bytes(struct.pack("<2Q", 0, len(line) + 1))
    with Inputs.open(tmp_path) as inputs, pytest.raises(Unreadable, match="is damaged: entry 0"):
        inputs[0]


def test_the_lock_of_a_writer_is_on_its_file_of_samples(tmp_path: Path) -> None:
    with InputsWriter(tmp_path):
        (path,) = tmp_path.glob(".inputs-*/samples.jsonl")
        with path.open("r+b") as file, pytest.raises(BlockingIOError):
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)

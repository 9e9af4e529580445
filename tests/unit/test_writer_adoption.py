from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import orjson
import pytest

from headrace.dumpfolder import read_dump
from headrace.messages import StoreJob
from headrace.tensorfile import decode_header, encode_header
from headrace_writer import formats
from headrace_writer.destination import HashingFile
from headrace_writer.formats.base import RowSource
from headrace_writer.source import open_source
from headrace_writer.store import DumpGone, Store, Stored
from tests.support.dumps import ENGINE, random_states
from tests.support.stores import AT, BOUNDARIES, HIDDEN, Sample, assert_stored, make_sample, make_spec

FORM = formats.get("headrace")
TOKENS = 12
NAN = {"BF16": 0x7FC0, "F16": 0x7E00, "F32": 0x7FC00000}
MINUS_INFINITY = {"BF16": 0xFF80, "F16": 0xFC00, "F32": 0xFF800000}
MINUS_ZERO = {"BF16": 0x8000, "F16": 0x8000, "F32": 0x80000000}


def place_row(
    tmp_path: Path,
    sample: Sample,
    job: StoreJob | None = None,
    change: Callable[[RowSource], RowSource] | None = None,
    form: str = FORM.name,
    **dump: Any,
) -> Path:
    """Put a row there as a writer would that was killed before its line, from a dump that is gone after."""
    made = sample.dump(tmp_path, attempt=5, **dump)
    source = open_source(made, read_dump(made), job or sample.job(attempt=5))
    assert isinstance(source, RowSource)
    path = tmp_path / "dataset" / formats.get(form).path(7)
    path.parent.mkdir(parents=True)
    with HashingFile(path) as file:
        formats.get(form).write(change(source) if change else source, file)
    made.unlink()
    return path


def store_of(tmp_path: Path) -> Store:
    return Store(tmp_path / "dataset", make_spec(tmp_path / "dataset"), "w1")


def states_with(dtype: str, bits: int, where: Any, width: int = len(BOUNDARIES) * HIDDEN) -> Any:
    states = random_states((TOKENS, width), dtype, 3)
    states.view("<u4" if dtype == "F32" else "<u2")[where] = bits
    return states


def problem_after_store(tmp_path: Path, sample: Sample) -> str:
    """Store the sample over a wrong row; return what the quarantined row's note says."""
    dump = sample.dump(tmp_path)
    wrong = (tmp_path / "dataset" / FORM.path(7)).read_bytes()
    outcome = store_of(tmp_path).store(sample.job(), dump, AT)
    assert isinstance(outcome, Stored)
    assert not outcome.adopted
    assert_stored(tmp_path / "dataset", [sample])
    kept = sorted((tmp_path / "dataset" / ".quarantine").iterdir())
    assert [path.suffix for path in kept] == [".bad", ".json"]
    assert kept[0].read_bytes() == wrong
    note = orjson.loads(kept[1].read_bytes())
    assert (note["sample"], note["request"], note["path"]) == (sample.name, str(sample.request()), str(FORM.path(7)))
    return str(note["problem"])


@pytest.mark.parametrize("dtype", ["BF16", "F16", "F32"])
@pytest.mark.parametrize("dump_is_there", [True, False])
def test_a_right_row_is_adopted_whatever_a_dump_of_the_sample_holds(
    tmp_path: Path, dtype: str, dump_is_there: bool
) -> None:
    sample = make_sample()
    path = place_row(tmp_path, sample, dtype=dtype)
    before = path.read_bytes()
    dump = sample.dump(tmp_path, dtype=dtype)
    if not dump_is_there:
        dump.unlink()
    outcome = store_of(tmp_path).store(sample.job(), dump, AT)
    assert isinstance(outcome, Stored)
    assert outcome.adopted
    assert outcome.line.request == str(sample.request(attempt=5))
    assert path.read_bytes() == before
    assert_stored(tmp_path / "dataset", [sample])


def test_a_row_of_other_ids_is_quarantined(tmp_path: Path) -> None:
    sample, other = make_sample(7), make_sample(8)
    place_row(tmp_path, other)
    assert "token ids are not the sample's" in problem_after_store(tmp_path, sample)


def test_a_row_of_fewer_ids_is_quarantined(tmp_path: Path) -> None:
    place_row(tmp_path, make_sample(7, tokens=5))
    assert problem_after_store(tmp_path, make_sample(7)) == "its 5 token ids are not the sample's 12"


def test_a_row_of_another_mask_is_quarantined(tmp_path: Path) -> None:
    sample = make_sample()
    place_row(tmp_path, sample, job=sample.job(attempt=5, mask=(0, TOKENS)))
    assert "loss mask" in problem_after_store(tmp_path, sample)


@pytest.mark.parametrize("dtype", ["BF16", "F16", "F32"])
@pytest.mark.parametrize("bits", [NAN, MINUS_INFINITY])
def test_a_row_with_one_value_that_is_not_finite_is_quarantined(
    tmp_path: Path, dtype: str, bits: dict[str, int]
) -> None:
    sample = make_sample()
    place_row(tmp_path, sample, dtype=dtype, aux=states_with(dtype, bits[dtype], (TOKENS - 1, -1)))
    assert "aux holds values that are NaN or infinite" in problem_after_store(tmp_path, sample)


@pytest.mark.parametrize("dtype", ["BF16", "F16", "F32"])
@pytest.mark.parametrize("bits", [0, None])
def test_a_row_with_one_boundary_all_zeros_for_one_token_is_quarantined(
    tmp_path: Path, dtype: str, bits: int | None
) -> None:
    sample = make_sample()
    zero = MINUS_ZERO[dtype] if bits is None else bits
    middle = (4, slice(HIDDEN, 2 * HIDDEN))
    place_row(tmp_path, sample, dtype=dtype, aux=states_with(dtype, zero, middle))
    assert "aux holds a row that is all zeros" in problem_after_store(tmp_path, sample)


def test_a_final_state_of_zeros_is_quarantined(tmp_path: Path) -> None:
    sample = make_sample()
    place_row(tmp_path, sample, final=states_with("BF16", 0, 0, HIDDEN))
    assert "final holds a row that is all zeros" in problem_after_store(tmp_path, sample)


def test_a_row_with_the_largest_finite_values_is_adopted(tmp_path: Path) -> None:
    sample = make_sample()
    place_row(tmp_path, sample, aux=states_with("BF16", 0xFF7F, (slice(None), slice(0, HIDDEN))))
    outcome = store_of(tmp_path).store(sample.job(), tmp_path / "gone", AT)
    assert isinstance(outcome, Stored)


def test_a_row_with_short_aux_is_quarantined(tmp_path: Path) -> None:
    sample = make_sample()

    def shorten(source: RowSource) -> RowSource:
        info = source.aux.info
        less = replace(info, shape=(TOKENS - 1, info.shape[1]), end=info.end - 2 * info.shape[1])
        return replace(source, aux=replace(source.aux, info=less, buffer=source.aux.buffer[: less.nbytes]))

    place_row(tmp_path, sample, change=shorten)
    assert problem_after_store(tmp_path, sample).startswith("aux (11, 48)")


def test_a_row_of_mixed_dtypes_is_quarantined(tmp_path: Path) -> None:
    sample = make_sample()

    def mix(source: RowSource) -> RowSource:
        return replace(source, final=replace(source.final, info=replace(source.final.info, dtype="F16")))

    place_row(tmp_path, sample, change=mix)
    assert problem_after_store(tmp_path, sample) == "aux is BF16, final is F16"


@pytest.mark.parametrize(
    ("field", "value", "problem"),
    [
        ("boundaries", (2, 4, 5), "boundaries (2, 4, 5), expected (2, 4, 6)"),
        ("final_state", "post_norm", "final state 'post_norm', expected 'pre_norm'"),
        ("engine", "another", f"engine 'another', expected {ENGINE!r}"),
        ("weight_version", "another", "weights 'another', expected 'default'"),
    ],
)
def test_a_row_from_elsewhere_is_quarantined(tmp_path: Path, field: str, value: Any, problem: str) -> None:
    sample = make_sample()
    place_row(tmp_path, sample, change=lambda source: replace(source, header=replace(source.header, **{field: value})))
    assert problem_after_store(tmp_path, sample) == problem


def test_a_row_of_another_sample_name_or_ordinal_is_quarantined(tmp_path: Path) -> None:
    sample = make_sample()
    place_row(tmp_path, sample, job=sample.job(attempt=5, sample="another"))
    assert problem_after_store(tmp_path, sample) == "sample 'another', expected 'sample-7'"


def test_a_row_at_the_place_of_another_ordinal_is_quarantined(tmp_path: Path) -> None:
    sample = make_sample()
    place_row(tmp_path, replace(sample, ordinal=6))
    assert problem_after_store(tmp_path, sample) == "ordinal 6, expected 7"


def test_a_torn_row_is_quarantined(tmp_path: Path) -> None:
    sample = make_sample()
    path = place_row(tmp_path, sample)
    path.write_bytes(path.read_bytes()[:-1])
    assert "the file holds" in problem_after_store(tmp_path, sample)


@pytest.mark.parametrize("form", formats.names())
@pytest.mark.parametrize("part", ["aux", "final"])
def test_a_row_with_one_bit_flipped_is_quarantined(tmp_path: Path, form: str, part: str) -> None:
    """No value of it gives the flip away, and a line would be given a checksum of it."""
    sample, output = make_sample(), tmp_path / "dataset"
    spec = make_spec(output, format=form, final_state="post_norm")
    post_norm = {"final_state": "post_norm"}
    path = place_row(tmp_path, sample, form=form, changes=post_norm)
    whole = path.read_bytes()
    states = getattr(formats.get(form).read(path), part).buffer.tobytes()
    damaged = bytearray(whole)
    damaged[whole.index(states) + 100] ^= 1
    path.write_bytes(damaged)
    outcome = Store(output, spec, "w1").store(sample.job(), sample.dump(tmp_path, changes=post_norm), AT)
    assert isinstance(outcome, Stored)
    assert not outcome.adopted
    (kept,) = (output / ".quarantine").glob("*.bad")
    assert kept.read_bytes() == damaged
    assert path.read_bytes() != damaged


@pytest.mark.parametrize("form", formats.names())
def test_a_whole_row_is_adopted_in_any_format(tmp_path: Path, form: str) -> None:
    sample, output = make_sample(), tmp_path / "dataset"
    place_row(tmp_path, sample, form=form, changes={"final_state": "post_norm"})
    spec = make_spec(output, format=form, final_state="post_norm")
    outcome = Store(output, spec, "w1").store(sample.job(), tmp_path / "gone", AT)
    assert isinstance(outcome, Stored)
    assert outcome.adopted


def test_a_row_that_has_no_checksum_as_those_of_the_first_version_is_adopted(tmp_path: Path) -> None:
    sample = make_sample()
    path = place_row(tmp_path, sample)
    data = path.read_bytes()
    tensors, metadata, offset = decode_header(data, len(data))
    del metadata["checksum"]
    path.write_bytes(encode_header(tensors, metadata) + data[offset:])
    outcome = store_of(tmp_path).store(sample.job(), tmp_path / "gone", AT)
    assert isinstance(outcome, Stored)
    assert outcome.adopted


def test_a_row_from_a_dump_in_another_order_has_no_checksum_and_is_adopted(tmp_path: Path) -> None:
    """The dump's checksum covers the same bytes in the row's order only."""
    sample = make_sample()

    def reorder(source: RowSource) -> RowSource:
        tensors = dict(source.header.tensors)
        moved = replace(tensors["final"], begin=0, end=tensors["final"].nbytes)
        later = {
            name: replace(info, begin=info.begin + moved.nbytes, end=info.end + moved.nbytes)
            for name, info in tensors.items()
            if name != "final"
        }
        return replace(source, header=replace(source.header, tensors={**later, "final": moved}))

    place_row(tmp_path, sample, change=reorder)
    outcome = store_of(tmp_path).store(sample.job(), tmp_path / "gone", AT)
    assert isinstance(outcome, Stored)
    assert outcome.adopted


def test_a_link_at_the_place_of_a_row_is_quarantined_unfollowed(tmp_path: Path) -> None:
    sample = make_sample()
    path = place_row(tmp_path, sample)
    target = path.rename(tmp_path / "target")
    path.symlink_to(target)
    assert problem_after_store(tmp_path, sample) == "not a regular file"
    assert target.exists()


def test_a_wrong_row_without_a_dump_is_quarantined_and_the_dump_is_gone(tmp_path: Path) -> None:
    sample = make_sample()
    path = place_row(tmp_path, make_sample(8))
    assert store_of(tmp_path).store(sample.job(), tmp_path / "gone", AT) == DumpGone()
    assert not path.exists()


def test_the_scan_covers_every_block(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace_writer.rows.SCAN_BYTES", 200)
    for token in (0, 5, TOKENS - 1):
        folder = tmp_path / str(token)
        folder.mkdir()
        place_row(folder, make_sample(), aux=states_with("BF16", NAN["BF16"], (token, 1)))
        assert "NaN" in problem_after_store(folder, make_sample())

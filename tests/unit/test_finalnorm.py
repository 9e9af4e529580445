from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open

from headrace.dumpfolder import read_norm
from headrace.errors import Unreadable
from headrace.finalnorm import FinalNorm, declared_norm, with_norm
from headrace.tensorfile import encode_header, layout
from tests.support.dumps import make_norm


@given(
    dtype=st.sampled_from(["BF16", "F16", "F32"]),
    hidden=st.integers(1, 300),
    eps=st.floats(0, 1, allow_subnormal=True),
    seed=st.integers(0, 99),
)
def test_a_norm_reads_back_as_it_was_written(dtype: str, hidden: int, eps: float, seed: int) -> None:
    made = make_norm(hidden, dtype, seed)
    norm = FinalNorm(dtype=dtype, hidden_size=hidden, weight=made.weight, eps=eps)
    assert FinalNorm.decode(norm.encode()) == norm


def test_a_fingerprint_says_which_norm() -> None:
    norm = make_norm(16)
    others = [make_norm(16, seed=8), make_norm(16, "F16"), replace(norm, eps=1e-6), replace(norm, dtype="F16")]
    for name in ("engine 1 m bf16 tp1", "engine\n", "e norm-0123456789abcdef"):
        assert declared_norm(with_norm(name, norm)) == norm.digest
    assert len({with_norm("engine", each) for each in (norm, *others, None)}) == 6
    for fingerprint in ("", "engine", "norm-0123456789abcdef", "e norm-0123456789abcde", "e norm-0123456789abcdef x"):
        assert declared_norm(with_norm(fingerprint, None)) is None


def test_the_safetensors_library_reads_it(tmp_path: Path) -> None:
    path = tmp_path / "norm.safetensors"
    path.write_bytes(make_norm(16).encode())
    with safe_open(path, "pt") as file:
        assert file.metadata() == {"eps": "1e-05", "checksum": f"xxh3:{make_norm(16).digest}"}
        assert file.get_tensor("weight").shape == (16,)


@pytest.mark.parametrize(
    ("tensors", "metadata", "says"),
    [
        ([("weight", "F32", (4,))], {}, "KeyError: 'eps'"),
        ([("weight", "F32", (4,))], {"eps": "1"}, "damaged: checksum 'xxh3:'"),
        ([("weight", "F32", (4,))], {"eps": "x"}, "eps|float"),
        ([("weight", "F32", (4,))], {"eps": "nan"}, "its eps nan"),
        ([("weight", "F32", (4,))], {"eps": "-1"}, "its eps -1"),
        ([("weight", "F32", (2, 2))], {"eps": "1"}, "weight"),
        ([("weight", "I64", (2,))], {"eps": "1"}, "weight is I64"),
        ([("bias", "F32", (4,))], {"eps": "1"}, "weight"),
        ([("weight", "F32", (2,)), ("bias", "F32", (2,))], {"eps": "1"}, "weight. alone"),
    ],
)
def test_another_form_is_unreadable(
    tensors: list[tuple[str, str, tuple[int, ...]]], metadata: dict[str, str], says: str
) -> None:
    with pytest.raises(Unreadable, match=says):
        FinalNorm.decode(encode_header(layout(tensors), {"checksum": "xxh3:", **metadata}) + bytes(16))


@given(norm=st.integers(0, 99).map(lambda seed: make_norm(16, seed=seed)), data=st.data())
def test_every_flipped_bit_is_found(norm: FinalNorm, data: st.DataObject) -> None:
    damaged = bytearray(norm.encode())
    bit = data.draw(st.integers(0, 8 * len(damaged) - 1))
    damaged[bit // 8] ^= 1 << bit % 8
    try:
        assert FinalNorm.decode(bytes(damaged)) == norm  # a bit of the header that says nothing
    except Unreadable:
        pass
    else:
        assert bit // 8 < len(damaged) - len(norm.weight)


def test_a_checksum_is_wanted_and_covers_weight_dtype_and_eps() -> None:
    norm = make_norm(4, "F16")
    tensors = layout([("weight", "F16", (4,))])
    with pytest.raises(Unreadable, match="KeyError: 'checksum'"):
        FinalNorm.decode(encode_header(tensors, {"eps": "1e-05"}) + norm.weight)
    changes: tuple[dict[str, Any], ...] = ({"eps": 1e-6}, {"dtype": "BF16"}, {"weight": norm.weight[::-1]})
    for change in changes:
        other = replace(norm, **change)
        assert other.digest != norm.digest
        metadata = {"eps": repr(other.eps), "checksum": f"xxh3:{norm.digest}"}
        with pytest.raises(Unreadable, match=f"damaged: checksum 'xxh3:{norm.digest}', its content has xxh3:"):
            FinalNorm.decode(encode_header(layout([("weight", other.dtype, (4,))]), metadata) + other.weight)


def test_a_torn_file_is_unreadable_and_named_and_a_missing_one_is_missing(tmp_path: Path) -> None:
    path = tmp_path / "norm.safetensors"
    data = make_norm(16).encode()
    for length in (0, 7, 40, len(data) - 1):
        path.write_bytes(data[:length])
        with pytest.raises(Unreadable, match=r"norm\.safetensors"):
            read_norm(path)
    with pytest.raises(FileNotFoundError):
        read_norm(tmp_path / "none")

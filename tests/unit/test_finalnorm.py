from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open

from headrace.dumpfolder import read_norm
from headrace.errors import Unreadable
from headrace.finalnorm import FinalNorm
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


def test_the_safetensors_library_reads_it(tmp_path: Path) -> None:
    path = tmp_path / "norm.safetensors"
    path.write_bytes(make_norm(16).encode())
    with safe_open(path, "pt") as file:
        assert file.metadata() == {"eps": "1e-05"}
        assert file.get_tensor("weight").shape == (16,)


@pytest.mark.parametrize(
    ("tensors", "metadata", "says"),
    [
        ([("weight", "F32", (4,))], {}, "eps"),
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
        FinalNorm.decode(encode_header(layout(tensors), metadata) + bytes(16))


def test_a_torn_file_is_unreadable_and_named_and_a_missing_one_is_missing(tmp_path: Path) -> None:
    path = tmp_path / "norm.safetensors"
    data = make_norm(16).encode()
    for length in (0, 7, 40, len(data) - 1):
        path.write_bytes(data[:length])
        with pytest.raises(Unreadable, match=r"norm\.safetensors"):
            read_norm(path)
    with pytest.raises(FileNotFoundError):
        read_norm(tmp_path / "none")

from __future__ import annotations

import math

import pytest
import torch

from headrace.dumps import Stats
from headrace_capture.batching import Batch
from headrace_capture.copiers import HostCopier
from headrace_capture.forward import Forward
from headrace_capture.rows import Memory, Rows, RowShape
from headrace_capture.stats import Accumulator

K, D = 2, 8


def rows_of(aux: torch.Tensor, final: torch.Tensor) -> tuple[RowShape, Rows]:
    shape = RowShape(boundaries=K, hidden_size=D, dtype=final.dtype)
    rows = Rows(Memory(shape, torch.zeros(shape.nbytes(len(final)), dtype=torch.uint8)), 0, len(final))
    forward = Forward(
        pieces=(),
        token_ids=torch.arange(len(final)),
        boundaries=tuple(aux[:, k * D : (k + 1) * D] for k in range(K)),
        final=final,
        weight_version="",
    )
    HostCopier().copy(forward, Batch(begin=0, end=len(final), cuts=()), rows)
    return shape, rows


def stats_of(aux: torch.Tensor, final: torch.Tensor, *parts: tuple[int, int]) -> tuple[Stats, ...]:
    shape, rows = rows_of(aux, final)
    accumulator = Accumulator(shape)
    for begin, end in parts or ((0, len(final)),):
        accumulator.add(rows, begin, end)
    return accumulator.stats((3, 5))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_the_norms_are_those_of_the_rows_and_parts_merge(dtype: torch.dtype) -> None:
    aux, final = torch.randn(12, K * D).to(dtype), torch.randn(12, D).to(dtype)
    expected = [aux[:, :D], aux[:, D:], final]
    got = stats_of(aux, final, (0, 5), (5, 6), (6, 12))
    assert [entry.layer for entry in got] == ["3", "5", "final"]
    for entry, states in zip(got, expected, strict=True):
        norms = torch.linalg.vector_norm(states.double(), dim=1)
        assert entry.not_finite == 0
        assert entry.norm_min == pytest.approx(float(norms.min()), rel=torch.finfo(dtype).eps)
        assert entry.norm_max == pytest.approx(float(norms.max()), rel=torch.finfo(dtype).eps)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_each_value_that_is_not_finite_is_counted_where_it_is(dtype: torch.dtype) -> None:
    aux, final = torch.ones(600, K * D, dtype=dtype), torch.ones(600, D, dtype=dtype)
    aux[3, D + 1] = math.nan
    aux[300:, D] = math.inf
    aux[599, D + 2] = -math.inf
    got = stats_of(aux, final)
    assert [entry.not_finite for entry in got] == [0, 302, 0]
    assert all(math.isfinite(entry.norm_min) and math.isfinite(entry.norm_max) for entry in got)


def test_a_row_of_zeros_has_the_norm_0() -> None:
    aux, final = torch.ones(4, K * D), torch.ones(4, D)
    final[2] = 0
    got = stats_of(aux, final)
    assert (got[2].norm_min, got[2].norm_max, got[2].not_finite) == (0.0, pytest.approx(math.sqrt(D)), 0)
    assert got[0].norm_min > 0


def test_states_whose_squares_leave_float32_are_measured_all_the_same() -> None:
    aux, final = torch.full((2, K * D), 1e30), torch.full((2, D), 1e-30)
    got = stats_of(aux, final)
    assert [entry.not_finite for entry in got] == [0, 0, 0]
    assert got[0].norm_max == pytest.approx(1e30 * math.sqrt(D)) and got[2].norm_min == pytest.approx(
        1e-30 * math.sqrt(D)
    )


def test_rows_that_are_all_nan_leave_finite_norms() -> None:
    got = stats_of(torch.full((3, K * D), math.nan), torch.full((3, D), math.nan))
    assert [(entry.not_finite, entry.norm_min, entry.norm_max) for entry in got] == [(3 * D, 0.0, 0.0)] * 3

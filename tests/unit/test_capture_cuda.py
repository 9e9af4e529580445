from __future__ import annotations

from pathlib import Path

import pytest
import torch

from headrace_capture.forward import Forward
from tests.support.capture import assert_published, forward_of, leftovers, lost, prompt, start_capture

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_states_of_static_buffers_that_the_next_forward_overwrites_are_captured(
    tmp_path: Path, dtype: torch.dtype
) -> None:
    folder = tmp_path / "dumps"
    capture = start_capture(folder, dtype=dtype, device="cuda", buffer_bytes=1 << 22)
    prompts = [prompt(700 + 300 * (number % 2), ordinal=number, dtype=dtype) for number in range(40)]
    rounds = list(zip(prompts[1::2], prompts[::2], strict=True))
    forwards = [forward_of([(a, 0, 1000), (b, 0, 700)], padding=100, device="cuda") for a, b in rounds]
    first = forwards[0]
    static = Forward(
        pieces=first.pieces,
        token_ids=torch.zeros_like(first.token_ids),
        boundaries=tuple(torch.zeros_like(b) for b in first.boundaries),
        final=torch.zeros_like(first.final),
        weight_version=first.weight_version,
    )
    for forward in forwards:
        torch.cuda._sleep(1_000_000)  # the states are computed later than forward() returns
        for target, source in zip(_tensors(static), _tensors(forward), strict=True):
            target.copy_(source)
        taken = Forward(
            pieces=forward.pieces,
            token_ids=static.token_ids,
            boundaries=static.boundaries,
            final=static.final,
            weight_version=forward.weight_version,
        )
        assert capture.forward(taken) == {}
    assert capture.flush(60)
    for one in prompts:
        assert_published(folder, one)
    assert capture.counts().buffer_bytes == 0 and leftovers(folder) == []
    capture.close(10)


def test_chunks_larger_than_the_pinned_buffer_come_from_the_device(tmp_path: Path) -> None:
    folder = tmp_path / "dumps"
    capture = start_capture(folder, device="cuda", buffer_bytes=1 << 16)
    one = prompt(3000)
    for begin in (0, 1500):
        assert capture.forward(forward_of([(one, begin, begin + 1500)], device="cuda")) == {}
    assert capture.flush(60)
    assert assert_published(folder, one).parts == 2
    capture.close(10)


def test_states_on_another_device_than_declared_are_lost_with_the_reason(tmp_path: Path) -> None:
    folder = tmp_path / "dumps"
    capture = start_capture(folder, device="cuda")
    one = prompt(30)
    assert capture.forward(forward_of([(one, 0, 30)])) == {one.rid: "dropped:internal"}
    assert capture.flush(60)
    assert "declared cuda" in lost(folder, one).detail
    capture.close(10)


def _tensors(forward: Forward) -> tuple[torch.Tensor, ...]:
    return (forward.token_ids, *forward.boundaries, forward.final)

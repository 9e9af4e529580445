from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from headrace.dumpfolder import read_dump
from headrace.errors import UsageError
from headrace_capture.batching import Batch
from headrace_capture.copiers import DeviceCopier
from headrace_capture.core import Capture
from headrace_capture.forward import Forward
from headrace_capture.ring import Ring, register
from headrace_capture.rows import Memory, Rows, RowShape
from tests.support.capture import (
    BOUNDARIES,
    HIDDEN,
    assert_published,
    forward_of,
    leftovers,
    lost,
    prompt,
    start_capture,
)

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

ROOT = Path(__file__).parents[2]
K = len(BOUNDARIES)


def tensors(forward: Forward) -> tuple[torch.Tensor, ...]:
    return (forward.token_ids, *forward.boundaries, forward.final)


def as_they_come(forward: Forward) -> Forward:
    return forward


def packed(forward: Forward) -> Forward:
    return with_boundaries(forward, (torch.cat(forward.boundaries, dim=1),))


def views_of_packed(forward: Forward) -> Forward:
    aux = torch.cat(forward.boundaries, dim=1)
    return with_boundaries(forward, tuple(aux[:, k * HIDDEN : (k + 1) * HIDDEN] for k in range(K)))


def with_boundaries(forward: Forward, boundaries: tuple[torch.Tensor, ...]) -> Forward:
    return Forward(
        pieces=forward.pieces,
        token_ids=forward.token_ids,
        boundaries=boundaries,
        final=forward.final,
        weight_version=forward.weight_version,
    )


def settle(capture: Capture) -> None:
    assert capture.flush(60)
    assert capture.counts().buffer_bytes == 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("form", [as_they_come, packed, views_of_packed])
@pytest.mark.parametrize("buffer_bytes", [1 << 16, 1 << 22])
def test_states_of_static_buffers_that_the_next_forward_overwrites_are_captured(
    tmp_path: Path, dtype: torch.dtype, form: Callable[[Forward], Forward], buffer_bytes: int
) -> None:
    folder = tmp_path / "dumps"
    capture = start_capture(folder, dtype=dtype, device="cuda", buffer_bytes=buffer_bytes)
    prompts = [prompt(700 + 300 * (number % 2), ordinal=number, dtype=dtype) for number in range(20)]
    rounds = list(zip(prompts[1::2], prompts[::2], strict=True))
    forwards = [form(forward_of([(a, 0, 1000), (b, 0, 700)], padding=100, device="cuda")) for a, b in rounds]
    static = [torch.zeros_like(tensor) for tensor in tensors(forwards[0])]
    for forward in forwards:
        torch.cuda._sleep(1_000_000)  # the states are computed later than forward() returns
        for target, source in zip(static, tensors(forward), strict=True):
            target.copy_(source)
        taken = Forward(
            pieces=forward.pieces,
            token_ids=static[0],
            boundaries=tuple(static[1:-1]),
            final=static[-1],
            weight_version=forward.weight_version,
        )
        assert capture.forward(taken) == {}
    settle(capture)
    for one in prompts:
        assert_published(folder, one)
    assert leftovers(folder) == []
    capture.close(10)


def test_memory_that_the_engine_frees_and_takes_again_is_captured_as_it_was(tmp_path: Path) -> None:
    folder = tmp_path / "dumps"
    capture = start_capture(folder, device="cuda", buffer_bytes=1 << 20)
    prompts = [prompt(800, ordinal=number) for number in range(30)]
    for one in prompts:
        torch.cuda._sleep(500_000)
        made = forward_of([(one, 0, 800)], device="cuda")
        assert capture.forward(made) == {}
        sizes = [(tensor.shape, tensor.dtype) for tensor in tensors(made)]
        del made
        for size, dtype in sizes:  # most likely in the same place
            torch.full(size, 77, dtype=dtype, device="cuda")
    settle(capture)
    for one in prompts:
        assert_published(folder, one)
    capture.close(10)


def test_rows_of_others_in_between_and_chunks_and_odd_row_counts(tmp_path: Path) -> None:
    folder = tmp_path / "dumps"
    capture = start_capture(folder, device="cuda", buffer_bytes=1 << 18)
    ours = [prompt(tokens, ordinal=tokens) for tokens in (1, 3, 17, 255, 1301)]
    other = prompt(11, rid="0b3f-health")
    rows = [part for one in ours[:-1] for part in ((one, 0, one.tokens), (other, 0, 11))]
    assert capture.forward(forward_of([*rows, (ours[-1], 0, 513)], padding=5, device="cuda")) == {}
    assert capture.forward(forward_of([(ours[-1], 513, 1025)], device="cuda")) == {}
    last = [(ours[-1], 1025, 1301)]
    assert capture.forward(forward_of(last, decode=[ours[0], other], device="cuda")) == {}
    settle(capture)
    for one in ours:
        assert_published(folder, one)
    assert assert_published(folder, ours[-1]).parts == 3
    capture.close(10)


def test_forwards_on_another_stream_than_the_default_one_are_captured(tmp_path: Path) -> None:
    folder = tmp_path / "dumps"
    capture = start_capture(folder, device="cuda", buffer_bytes=1 << 20)
    stream = torch.cuda.Stream()
    prompts = [prompt(900, ordinal=number) for number in range(10)]
    made = [forward_of([(one, 0, 900)], device="cuda") for one in prompts]
    static = [torch.zeros_like(tensor) for tensor in tensors(made[0])]
    torch.cuda.synchronize()
    with torch.inference_mode(), torch.cuda.stream(stream):
        for forward in made:
            torch.cuda._sleep(1_000_000)
            for target, source in zip(static, tensors(forward), strict=True):
                target.copy_(source)
            taken = Forward(
                pieces=forward.pieces,
                token_ids=static[0],
                boundaries=tuple(static[1:-1]),
                final=static[-1],
                weight_version="w",
            )
            assert capture.forward(taken) == {}
    settle(capture)
    for one in prompts:
        assert_published(folder, one)
    capture.close(10)


def test_a_captured_graphs_output_is_captured_at_each_replay(tmp_path: Path) -> None:
    folder = tmp_path / "dumps"
    capture = start_capture(folder, device="cuda", buffer_bytes=1 << 20)
    prompts = [prompt(600, ordinal=number) for number in range(10)]
    made = [forward_of([(one, 0, 600)], device="cuda") for one in prompts]
    inputs = [torch.zeros_like(tensor) for tensor in tensors(made[0])]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = [tensor + 0 for tensor in inputs]
    for forward in made:
        for target, source in zip(inputs, tensors(forward), strict=True):
            target.copy_(source)
        graph.replay()
        taken = Forward(
            pieces=forward.pieces,
            token_ids=outputs[0],
            boundaries=tuple(outputs[1:-1]),
            final=outputs[-1],
            weight_version="w",
        )
        assert capture.forward(taken) == {}
    settle(capture)
    for one in prompts:
        assert_published(folder, one)
    capture.close(10)


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
def test_a_forward_takes_no_memory_and_waits_for_nothing_that_the_device_does(tmp_path: Path) -> None:
    folder = tmp_path / "dumps"
    capture = start_capture(folder, device="cuda", buffer_bytes=1 << 22)
    prompts = [prompt(500, ordinal=number) for number in range(12)]
    made = [forward_of([(one, 0, 500)], device="cuda") for one in prompts]
    torch.cuda.synchronize()
    torch.cuda._sleep(2_000_000_000)  # about a second
    busy = torch.cuda.Event()
    busy.record()
    taken = torch.cuda.memory_stats()["allocation.all.allocated"]
    reserved = torch.cuda.memory_reserved()
    pinned = host_allocations()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for forward in made:
            assert capture.forward(forward) == {}
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert not busy.query(), "the device had gone on before forward() returned"
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == taken
    assert torch.cuda.memory_reserved() == reserved
    assert host_allocations() == pinned
    settle(capture)
    for one in prompts:
        assert_published(folder, one)
    capture.close(10)


def host_allocations() -> int:
    stats = getattr(torch.cuda, "host_memory_stats", dict)()
    return int(stats.get("num_host_alloc", 0))


def test_norms_are_those_of_the_rows_and_odd_values_are_counted(tmp_path: Path) -> None:
    folder = tmp_path / "dumps"
    capture = start_capture(folder, device="cuda")
    one = prompt(300)
    one.boundaries[1][33, 5] = float("nan")
    one.final[7, :3] = float("inf")
    assert capture.forward(forward_of([(one, 0, 300)], device="cuda")) == {}
    settle(capture)
    stats = read_dump(folder / f"{one.rid}.safetensors").header.stats
    assert [entry.not_finite for entry in stats] == [0, 1, 0, 3]
    norms = torch.linalg.vector_norm(one.boundaries[0].double(), dim=1)
    assert stats[0].norm_min == pytest.approx(float(norms.min()), rel=1e-5)
    assert stats[0].norm_max == pytest.approx(float(norms.max()), rel=1e-5)
    capture.close(10)


def test_a_wide_engine_with_one_boundary_and_one_with_eight(tmp_path: Path) -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    for k, hidden in ((1, 7168), (8, 1024), (3, 3), (2, 1)):
        shape = RowShape(boundaries=k, hidden_size=hidden, dtype=torch.bfloat16)
        ring = Ring(shape.nbytes(257), device=device)
        memory = Memory(shape, ring.tensor)
        copier = DeviceCopier(shape, device, 257)
        boundaries = tuple(torch.randn(300, hidden, device=device).bfloat16() for _ in range(k))
        final = torch.randn(300, hidden, device=device).bfloat16()
        forward = Forward(
            pieces=(),
            token_ids=torch.arange(300, device=device),
            boundaries=boundaries,
            final=final,
            weight_version="",
        )
        for begin, end in ((0, 257), (43, 300), (5, 6), (0, 64)):
            rows = Rows(memory, 0, end - begin)
            copier.copy(forward, Batch(begin=begin, end=end, cuts=()), rows).synchronize()
            assert torch.equal(rows.ids(), torch.arange(begin, end))
            assert torch.equal(rows.aux(), torch.cat(boundaries, dim=1)[begin:end].cpu())
            assert torch.equal(rows.final(), final[begin:end].cpu())
            states = torch.stack([*boundaries, final], dim=1)[begin:end].float()
            assert torch.allclose(rows.norms(0, end - begin), torch.linalg.vector_norm(states, dim=-1).cpu(), rtol=1e-3)
        assert copier.idle(0)
        ring.close()


def test_states_on_another_device_than_declared_are_lost_with_the_reason(tmp_path: Path) -> None:
    folder = tmp_path / "dumps"
    capture = start_capture(folder, device="cuda")
    one = prompt(30)
    assert capture.forward(forward_of([(one, 0, 30)])) == {one.rid: "dropped:internal"}
    settle(capture)
    assert "declared cuda" in lost(folder, one).detail
    capture.close(10)


def test_memory_that_the_device_does_not_have_is_a_usage_error_and_leaves_nothing(tmp_path: Path) -> None:
    folder = tmp_path / "dumps"
    reserved = torch.cuda.memory_reserved()
    with pytest.raises(UsageError, match="HEADRACE_CAPTURE_BUFFER_BYTES"):
        start_capture(folder, device="cuda", buffer_bytes=1 << 42)
    assert torch.cuda.memory_reserved() <= reserved
    assert not list(folder.iterdir())
    assert float(torch.ones(4, device="cuda").sum()) == 4


def test_memory_that_cuda_does_not_register_is_a_usage_error_and_cuda_works_on() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    ring = Ring(1 << 20, device=device)
    with pytest.raises(UsageError, match="cannot register"):
        register(ring.tensor, device)  # a second time
    for _ in range(3):
        assert float(torch.ones(4, device=device).sum()) == 4
    ring.close()
    torch.cuda.synchronize()


def test_the_statistics_tell_of_the_memory(tmp_path: Path) -> None:
    capture = start_capture(tmp_path / "dumps", device="cuda", buffer_bytes=1 << 22)
    stats = capture.stats()
    assert (stats.ring_bytes, stats.pinned_bytes) == (1 << 22, 1 << 22)
    assert 0 < stats.device_bytes <= (1 << 22) // 3
    capture.close(10)
    assert capture.stats().pinned_bytes == 0


def test_a_process_that_ends_without_closing_ends_well(tmp_path: Path) -> None:
    script = (
        "import sys; from pathlib import Path\n"
        "from tests.support.capture import *\n"
        "capture = start_capture(Path(sys.argv[1]), device='cuda', buffer_bytes=1 << 24)\n"
        "for n in range(20): capture.forward(forward_of([(prompt(999, ordinal=n), 0, 999)], device='cuda'))\n"
    )
    folder = tmp_path / "dumps"
    done = subprocess.run(
        [sys.executable, "-c", script, str(folder)], cwd=ROOT, check=False, timeout=120, capture_output=True, text=True
    )
    assert (done.returncode, done.stderr) == (0, "")
    for number in range(20):
        assert_published(folder, prompt(999, ordinal=number))
    assert not [path for path in folder.iterdir() if path.name.startswith(".")]


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_the_second_device_is_used_and_the_first_left_alone(tmp_path: Path) -> None:
    folder = tmp_path / "dumps"
    before = torch.cuda.mem_get_info(0)[0]
    capture = start_capture(folder, device="cuda:1")
    one = prompt(500)
    with torch.cuda.device(1):
        assert capture.forward(forward_of([(one, 0, 500)], device="cuda:1")) == {}
    settle(capture)
    assert_published(folder, one)
    assert torch.cuda.mem_get_info(0)[0] == before
    capture.close(10)

"""Post-norm from pre-norm, bit for bit as transformers' RMSNorm of the Llama kind computes it on a CPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from headrace.finalnorm import FinalNorm
from headrace.tensorfile import TensorInfo
from headrace_writer.formats.base import NotFinite, States

_DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}
# Bytes of states that are computed with at once; a few times as many are needed beside them.
_CHUNK = 1 << 20


def normalise(norm: FinalNorm, states: States) -> Iterator[memoryview]:
    """Yield the final norm's output for states [N, D] in their dtype, some rows at a time.

    x * rsqrt(mean(x**2) + eps) in float32, rounded to the states' dtype, times the weight, as in
    https://github.com/huggingface/transformers, `LlamaRMSNorm.forward`.

    Raises:
        NotFinite: a value is NaN or infinite.
    """
    dtype = _DTYPES[states.info.dtype]
    weight = torch.frombuffer(bytearray(norm.weight), dtype=_DTYPES[norm.dtype])
    width = norm.hidden_size * dtype.itemsize
    step = max(1, _CHUNK // width) * width
    for start in range(0, len(states.buffer), step):
        rows = torch.frombuffer(bytearray(states.buffer[start : start + step]), dtype=dtype)
        with _one_thread():
            normed = _rms_norm(rows.reshape(-1, norm.hidden_size), weight, norm.eps)
            finite = bool(torch.isfinite(normed).all())
        if not finite:
            raise NotFinite(f"the final norm of tokens {start // width} and later gives NaN or infinite values")
        yield normed.view(torch.uint8).numpy().reshape(-1).data


def check_torch() -> None:
    """Normalise a row whose outcome is known, in every dtype; a torch that is not whole raises what it likes.

    Raises:
        RuntimeError: torch gives another outcome.
    """
    for name, dtype in _DTYPES.items():
        # Exact in all of them.
        row, weight, expected = (_bytes(row, dtype) for row in ((2, -2, 2, -2), (1, 2, 3, 4), (1, -2, 3, -4)))
        info = TensorInfo(dtype=name, shape=(1, 4), begin=0, end=len(row))
        norm = FinalNorm(dtype=name, hidden_size=4, weight=weight, eps=0.0)
        found = b"".join(normalise(norm, States(info=info, buffer=memoryview(row))))
        if found != expected:
            raise RuntimeError(f"it computes {found.hex()} in {name} where {expected.hex()} is right")


def _bytes(values: tuple[int, ...], dtype: torch.dtype) -> bytes:
    return torch.tensor(values, dtype=dtype).view(torch.uint8).numpy().tobytes()


@contextmanager
def _one_thread() -> Iterator[None]:
    """Beside an engine and other writers, torch's threads wait for each other: measured 15 times slower on 2 cores."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


@torch.inference_mode()
def _rms_norm(rows: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = rows.to(torch.float32)
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return (weight * wide.to(rows.dtype)).to(rows.dtype)

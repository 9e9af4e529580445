"""Makes dumps as the capture core publishes them, from random states and without torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from headrace.dumps import CHECKSUM_PREFIX, DUMP_SUFFIX, PRE_NORM, DumpHeader, Stats, dump_layout
from headrace.finalnorm import FinalNorm, with_norm
from headrace.ids import RequestId, encode_ids

BARE_ENGINE = "test-engine 1.0 tiny bf16 tp1"  # without its final norm
WEIGHTS = "default"
MODEL = "tiny"


def random_states(shape: tuple[int, ...], dtype: str, seed: int) -> npt.NDArray[Any]:
    """Random finite states: float32 for F32, float16 for F16, the bits as uint16 for BF16."""
    values = np.random.default_rng(seed).standard_normal(shape, dtype=np.float32)
    if dtype == "BF16":
        return (values.view(np.uint32) >> 16).astype("<u2")
    return values.astype({"F16": "<f2", "F32": "<f4"}[dtype])


def make_norm(hidden: int, dtype: str = "BF16", seed: int = 7) -> FinalNorm:
    """A final norm of random weights around 0."""
    weight = random_states((hidden,), dtype, seed).tobytes()
    return FinalNorm(dtype=dtype, hidden_size=hidden, weight=weight, eps=1e-5)


# The engine of samples of width 16.
ENGINE = with_norm(BARE_ENGINE, make_norm(16))


def make_dump(
    folder: Path,
    request: RequestId,
    token_ids: Sequence[int],
    boundaries: Sequence[int],
    hidden: int,
    dtype: str = "BF16",
    *,
    seed: int = 0,
    changes: Mapping[str, Any] | None = None,
    aux: npt.NDArray[Any] | None = None,
    final: npt.NDArray[Any] | None = None,
) -> Path:
    """Write a correct dump of random states and return its path.

    `aux` [N, k*D] and `final` [N, D] replace the random states; `changes` replaces fields of the header, the
    checksum among them.
    """
    tokens = len(token_ids)
    tensors = dump_layout(tokens, len(boundaries), hidden, dtype)
    aux = aux if aux is not None else random_states(tensors["aux"].shape, dtype, seed)
    final = final if final is not None else random_states(tensors["final"].shape, dtype, seed + 1)
    data = encode_ids(token_ids) + aux.tobytes() + final.tobytes()
    layers = [*(str(boundary) for boundary in boundaries), "final"]
    header = DumpHeader(
        request=str(request),
        tokens=tokens,
        boundaries=tuple(boundaries),
        final_state=PRE_NORM,
        parts=1,
        retractions=0,
        weight_version=WEIGHTS,
        model=MODEL,
        engine=ENGINE,
        stats=tuple(Stats(layer=layer, not_finite=0, norm_min=1.0, norm_max=9.0) for layer in layers),
        checksum=CHECKSUM_PREFIX + xxhash.xxh3_64_hexdigest(data),
        tensors=tensors,
    )
    path = folder / f"{request}{DUMP_SUFFIX}"
    path.write_bytes(replace(header, **(changes or {})).encode() + data)
    return path

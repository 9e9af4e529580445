"""The final norm's weight and eps as a file: an engine publishes it, and post-norm follows from pre-norm with it."""

from __future__ import annotations

import math
from dataclasses import dataclass

from headrace.errors import Unreadable
from headrace.tensorfile import decode_header, encode_header, layout

NORM_FILE = "final_norm.safetensors"  # its name in a dataset's folder
_DTYPES = frozenset({"BF16", "F16", "F32"})


@dataclass(frozen=True, slots=True, kw_only=True)
class FinalNorm:
    """An RMSNorm: `weight` [hidden_size] in `dtype` (BF16, F16, F32), little-endian, and `eps`."""

    dtype: str
    hidden_size: int
    weight: bytes
    eps: float

    def encode(self) -> bytes:
        """Encode as a safetensors file with the tensor `weight` and the metadata `eps`."""
        tensors = layout([("weight", self.dtype, (self.hidden_size,))])
        return encode_header(tensors, {"eps": repr(self.eps)}) + self.weight

    @classmethod
    def decode(cls, data: bytes) -> FinalNorm:
        """Decode a whole file; raises Unreadable for another form."""
        tensors, metadata, offset = decode_header(data, len(data))
        try:
            weight = tensors["weight"]
            (hidden_size,) = weight.shape
            eps = float(metadata["eps"])
        except (KeyError, ValueError) as error:
            raise Unreadable(f"a final norm holds `weight` [D] and `eps`: {type(error).__name__}: {error}") from error
        if len(tensors) > 1:
            raise Unreadable(f"a final norm holds `weight` alone, not {str(sorted(tensors))[:200]}")
        if weight.dtype not in _DTYPES or not (math.isfinite(eps) and eps >= 0):
            raise Unreadable(f"a final norm's weight is {weight.dtype}, its eps {eps}")
        return cls(dtype=weight.dtype, hidden_size=hidden_size, weight=data[offset:], eps=eps)

"""The final norm's weight and eps as a file: an engine publishes it, and post-norm follows from pre-norm with it."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

import xxhash

from headrace.dumps import CHECKSUM_PREFIX
from headrace.errors import Unreadable
from headrace.tensorfile import decode_header, encode_header, layout

NORM_FILE = "final_norm.safetensors"  # its name in a dataset's folder
_DTYPES = frozenset({"BF16", "F16", "F32"})
_DECLARED = re.compile(r".* norm-([0-9a-f]{16})", re.DOTALL)


@dataclass(frozen=True, slots=True, kw_only=True)
class FinalNorm:
    """An RMSNorm: `weight` [hidden_size] in `dtype` (BF16, F16, F32), little-endian, and `eps`."""

    dtype: str
    hidden_size: int
    weight: bytes
    eps: float

    @property
    def digest(self) -> str:
        """xxh3-64 over all that it is, the weight's bytes, their dtype and eps, as 16 hex digits."""
        return xxhash.xxh3_64_hexdigest(self.weight + f"{self.dtype} {self.eps!r}".encode())

    def encode(self) -> bytes:
        """Encode as a safetensors file with the tensor `weight` and the metadata `eps` and `checksum`, the digest."""
        tensors = layout([("weight", self.dtype, (self.hidden_size,))])
        metadata = {"eps": repr(self.eps), "checksum": CHECKSUM_PREFIX + self.digest}
        return encode_header(tensors, metadata) + self.weight

    @classmethod
    def decode(cls, data: bytes) -> FinalNorm:
        """Decode a whole file; raises Unreadable for another form or checksum."""
        tensors, metadata, offset = decode_header(data, len(data))
        try:
            weight = tensors["weight"]
            (hidden_size,) = weight.shape
            eps, checksum = float(metadata["eps"]), metadata["checksum"]
        except (KeyError, ValueError) as error:
            problem = f"{type(error).__name__}: {error}"
            raise Unreadable(f"a final norm holds `weight` [D], `eps` and `checksum`: {problem}") from error
        if len(tensors) > 1:
            raise Unreadable(f"a final norm holds `weight` alone, not {str(sorted(tensors))[:200]}")
        if weight.dtype not in _DTYPES or not (math.isfinite(eps) and eps >= 0):
            raise Unreadable(f"a final norm's weight is {weight.dtype}, its eps {eps}")
        norm = cls(dtype=weight.dtype, hidden_size=hidden_size, weight=data[offset:], eps=eps)
        if checksum != CHECKSUM_PREFIX + norm.digest:
            raise Unreadable(f"damaged: checksum {checksum[:40]!r}, its content has {CHECKSUM_PREFIX + norm.digest}")
        return norm


def norm_file(boot: str) -> str:
    """The name in a dump folder of the final norm that a boot publishes."""
    return f"final_norm.{boot}.safetensors"


def with_norm(fingerprint: str, norm: FinalNorm | None) -> str:
    """An engine's fingerprint with the digest of its final norm: other weights are then another engine."""
    return fingerprint if norm is None else f"{fingerprint} norm-{norm.digest}"


def declared_norm(fingerprint: str) -> str | None:
    """The digest of the final norm of the engine with this fingerprint; None where it publishes none."""
    found = _DECLARED.fullmatch(fingerprint)
    return found[1] if found else None

"""Request ids: one attempt at one sample, provable without any other state."""

from __future__ import annotations

import hashlib
import re
from array import array
from collections.abc import Sequence
from dataclasses import dataclass

from headrace.errors import InvalidId, UsageError

CANARY = "canary"
NONCE_LENGTH = 8
NONCE_ALPHABET = "abcdefghijklmnopqrstuvwxyz0123456789"

_RUN = re.compile(r"[a-z0-9]{1,24}")
_REQUEST = re.compile(r"hr-([a-z0-9]{1,24})-(0|[1-9][0-9]{0,11})-([a-z0-9]{8})-([1-9][0-9]{0,8})-([0-9a-f]{16})")


def check_run_name(name: str) -> str:
    """Return `name` if it may name a run.

    Raises:
        UsageError: the name is not `[a-z0-9]{1,24}`, or is the reserved `canary`.
    """
    if not _RUN.fullmatch(name):
        raise UsageError(f"run name {name!r}: use 1 to 24 of the characters a-z and 0-9")
    if name == CANARY:
        raise UsageError(f"run name {name!r} is reserved for the canary; choose another")
    return name


def encode_ids(token_ids: Sequence[int]) -> bytes:
    """Encode token ids as little-endian int64, the bytes of a dump's `token_ids` tensor."""
    values = array("q", token_ids)
    if values.itemsize != 8:  # pragma: no cover - no supported platform
        raise UsageError("this platform has no 64-bit array type")
    if memoryview(array("H", [1])).tobytes() != b"\x01\x00":  # pragma: no cover - big-endian machines
        values.byteswap()
    return values.tobytes()


def digest_ids(encoded: bytes) -> str:
    """Digest token ids given as little-endian int64: blake2b of 8 bytes, 16 hex digits."""
    return hashlib.blake2b(encoded, digest_size=8).hexdigest()


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestId:
    """`hr-{run}-{ordinal}-{nonce}-{tokens}-{digest}`.

    The last field has a fixed width, so no id is another's prefix: an abort may match by prefix.
    """

    run: str
    ordinal: int
    nonce: str
    tokens: int
    digest: str

    def __str__(self) -> str:
        return f"hr-{self.run}-{self.ordinal}-{self.nonce}-{self.tokens}-{self.digest}"

    @property
    def is_canary(self) -> bool:
        """Whether the request proves the capture path instead of carrying a sample."""
        return self.run == CANARY

    @classmethod
    def parse(cls, text: str) -> RequestId:
        """Parse an id, matched whole.

        Raises:
            InvalidId: the text is not an id of ours.
        """
        match = _REQUEST.fullmatch(text)
        if match is None:
            raise InvalidId(f"{text[:100]!r} is not a headrace request id")
        run, ordinal, nonce, tokens, digest = match.groups()
        return cls(run=run, ordinal=int(ordinal), nonce=nonce, tokens=int(tokens), digest=digest)

    @classmethod
    def make(cls, run: str, ordinal: int, nonce: str, token_ids: Sequence[int]) -> RequestId:
        """Make the id of an attempt; `nonce` is 8 of `[a-z0-9]`, fresh for each attempt."""
        made = cls(
            run=run,
            ordinal=ordinal,
            nonce=nonce,
            tokens=len(token_ids),
            digest=digest_ids(encode_ids(token_ids)),
        )
        return cls.parse(str(made))

    def proves(self, encoded: bytes) -> bool:
        """Whether these token ids (little-endian int64) are the ones that the id was made from."""
        return len(encoded) == 8 * self.tokens and digest_ids(encoded) == self.digest


def is_ours(text: str) -> bool:
    """Whether the text is, whole, a headrace request id."""
    return _REQUEST.fullmatch(text) is not None

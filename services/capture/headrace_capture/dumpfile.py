"""One dump while it is assembled: a hidden file of known size, filled by position, published by link."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from functools import lru_cache

import torch
import xxhash

from headrace.dumps import CHECKSUM_PREFIX, DUMP_SUFFIX, FILE_MODE, NO_CHECKSUM, DumpHeader, Stats, dump_layout
from headrace.ids import RequestId
from headrace.tensorfile import TensorInfo
from headrace_capture.folder import Folder, write_all
from headrace_capture.rows import DTYPES

_PAGE = 4096
_READ_BYTES = 1 << 20
_WIDEST_REQUEST = str(RequestId(run="r" * 24, ordinal=10**12 - 1, nonce="n" * 8, tokens=10**9 - 1, digest="d" * 16))
_WIDEST = Stats(layer="", not_finite=10**18, norm_min=-1.2345678901234567e-300, norm_max=-1.2345678901234567e-300)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineFacts:
    """What is the same in every dump of a boot."""

    model: str
    fingerprint: str
    boundaries: tuple[int, ...]
    final_state: str
    hidden_size: int
    dtype: torch.dtype

    @property
    def token_bytes(self) -> int:
        """Bytes of the data section per token."""
        return 8 + (len(self.boundaries) + 1) * self.hidden_size * self.dtype.itemsize

    def header(self, request: str, tokens: int, weight_version: str) -> DumpHeader:
        """A header whose parts, statistics and checksum are still placeholders, as wide as they can get."""
        layers = [*(str(boundary) for boundary in self.boundaries), "final"]
        return DumpHeader(
            request=request,
            tokens=tokens,
            boundaries=self.boundaries,
            final_state=self.final_state,
            parts=10**9,
            retractions=10**9,
            weight_version=weight_version,
            model=self.model,
            engine=self.fingerprint,
            stats=tuple(replace(_WIDEST, layer=layer) for layer in layers),
            checksum=NO_CHECKSUM,
            tensors=self.layout(tokens),
        )

    def layout(self, tokens: int) -> dict[str, TensorInfo]:
        """Where the tensors lie in a dump of so many tokens."""
        return dump_layout(tokens, len(self.boundaries), self.hidden_size, DTYPES[self.dtype])


@lru_cache(maxsize=8)
def header_width(facts: EngineFacts, weight_version: str) -> int:
    """Bytes that hold the header of any request: in full pages, so that the states begin on a page."""
    widest = facts.header(_WIDEST_REQUEST, 10**9, weight_version)
    return -(-len(widest.encode()) // _PAGE) * _PAGE


class DumpFile:
    """The hidden file of one request; used by one writer thread alone.

    `size` is the whole file's bytes in full pages, `unreserved` those for which the filesystem gave no room yet.
    """

    def __init__(self, folder: Folder, facts: EngineFacts, request: str, tokens: int, weight_version: str) -> None:
        self._folder = folder
        self._facts = facts
        self._request = request
        self._tokens = tokens
        self._weight_version = weight_version
        self._hidden = folder.hidden(f"{request}.part")
        self._width = header_width(facts, weight_version)
        self._data_bytes = tokens * facts.token_bytes
        self.size = -(-(self._width + self._data_bytes) // _PAGE) * _PAGE
        self.unreserved = self.size
        self._descriptor = -1
        self._digest: str | None = None

    def write(self, row: int, rows: int, sections: tuple[memoryview, memoryview, memoryview]) -> None:
        """Write rows [row, row + rows): their bytes of token_ids, aux and final.

        Room is reserved before a byte is written, so that a full filesystem is an error here and never a signal.

        Raises:
            OSError: no room, or the file cannot be written.
        """
        if self._descriptor < 0:
            self._open()
        tensors = self._facts.layout(self._tokens)
        whole = rows == self._tokens
        digest = xxhash.xxh3_64()
        for name, data in zip(("token_ids", "aux", "final"), sections, strict=True):
            begin = self._width + tensors[name].begin + tensors[name].nbytes // self._tokens * row
            os.posix_fallocate(self._descriptor, begin, len(data))
            self.unreserved = max(0, self.unreserved - len(data))
            write_all(self._descriptor, data, begin)
            if whole:
                digest.update(data)
        self._digest = digest.hexdigest() if whole else None

    def seal(self, *, parts: int, retractions: int, stats: tuple[Stats, ...]) -> None:
        """Write the header, now that every row is there; raises OSError."""
        header = replace(
            self._facts.header(self._request, self._tokens, self._weight_version),
            parts=parts,
            retractions=retractions,
            stats=stats,
            checksum=CHECKSUM_PREFIX + (self._digest or self._read_digest()),
        )
        write_all(self._descriptor, header.encode(self._width), 0)
        os.fchmod(self._descriptor, FILE_MODE)

    def publish(self) -> bool:
        """Give the file its name; False when a dump of that name was there already. Raises OSError."""
        self._close()
        return self._folder.publish(self._hidden, self._request + DUMP_SUFFIX)

    def discard(self) -> None:
        """Remove the hidden file; nothing happens when there is none."""
        if self._descriptor >= 0:
            self._close()
            self._folder.remove(self._hidden)
        self.unreserved = 0

    def _open(self) -> None:
        self._descriptor = self._folder.create(self._hidden)
        os.ftruncate(self._descriptor, self._width + self._data_bytes)
        os.posix_fallocate(self._descriptor, 0, self._width)
        self.unreserved -= self._width

    def _close(self) -> None:
        os.close(self._descriptor)
        self._descriptor = -1

    def _read_digest(self) -> str:
        digest = xxhash.xxh3_64()
        buffer = bytearray(min(_READ_BYTES, self._data_bytes))
        position, end = self._width, self._width + self._data_bytes
        while position < end:
            count = os.preadv(self._descriptor, [memoryview(buffer)[: end - position]], position)
            if count == 0:
                raise OSError(f"the hidden file of {self._request} was cut")
            digest.update(memoryview(buffer)[:count])
            position += count
        return digest.hexdigest()

"""One dump while it is assembled: a hidden file of known size, filled by position, published by link."""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import lru_cache

import torch
import xxhash

from headrace.dumps import CHECKSUM_PREFIX, DUMP_SUFFIX, FILE_MODE, NO_CHECKSUM, DumpHeader, Stats, dump_layout
from headrace.ids import RequestId
from headrace_capture.folder import Folder, write_all
from headrace_capture.room import Room
from headrace_capture.rows import DTYPES

_PAGE = 4096
_READ_BYTES = 4 << 20
_WIDEST_REQUEST = str(RequestId(run="r" * 24, ordinal=10**12 - 1, nonce="n" * 8, tokens=10**9 - 1, digest="d" * 16))
_WIDEST_NORM = -1.2345678901234567e-300

Sections = tuple[memoryview, memoryview, memoryview]


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
    def widths(self) -> tuple[int, int, int]:
        """Bytes of a token in token_ids, aux and final."""
        state = self.hidden_size * self.dtype.itemsize
        return 8, len(self.boundaries) * state, state

    def header(
        self,
        request: str,
        tokens: int,
        weight_version: str,
        *,
        parts: int,
        retractions: int,
        stats: tuple[Stats, ...],
        checksum: str,
    ) -> DumpHeader:
        """The header of a dump."""
        return DumpHeader(
            request=request,
            tokens=tokens,
            boundaries=self.boundaries,
            final_state=self.final_state,
            parts=parts,
            retractions=retractions,
            weight_version=weight_version,
            model=self.model,
            engine=self.fingerprint,
            stats=stats,
            checksum=checksum,
            tensors=dump_layout(tokens, len(self.boundaries), self.hidden_size, DTYPES[self.dtype]),
        )


@lru_cache(maxsize=8)
def header_width(facts: EngineFacts, weight_version: str) -> int:
    """Bytes that hold the header of any request: in full pages, so that the states begin on a page."""
    layers = [*(str(boundary) for boundary in facts.boundaries), "final"]
    widest = facts.header(
        _WIDEST_REQUEST,
        10**9,
        weight_version,
        parts=10**9,
        retractions=10**9,
        stats=tuple(
            Stats(layer=layer, not_finite=10**18, norm_min=_WIDEST_NORM, norm_max=_WIDEST_NORM) for layer in layers
        ),
        checksum=NO_CHECKSUM,
    )
    return _pages(len(widest.encode()))


class DumpFile:
    """The hidden file of one request; used by one writer thread alone.

    `size` is the whole file's bytes in full pages, all of which `room` promised.
    """

    def __init__(
        self, folder: Folder, room: Room, facts: EngineFacts, request: str, tokens: int, weight_version: str
    ) -> None:
        self._folder = folder
        self._room = room
        self._facts = facts
        self._request = request
        self._tokens = tokens
        self._weight_version = weight_version
        self._hidden = folder.hidden(f"{request}.part")
        self._width = header_width(facts, weight_version)
        self._end = self._width + tokens * sum(facts.widths)
        self.size = _pages(self._end)
        self._promised = self.size
        self._descriptor = -1

    def write(self, row: int, rows: int, sections: Sections) -> None:
        """Write rows [row, row + rows): their bytes of token_ids, aux and final.

        Raises:
            OSError: no room, or the file cannot be written.
        """
        self._open()
        begin = self._width
        for width, section in zip(self._facts.widths, sections, strict=True):
            self._put(section, begin + row * width)
            begin += self._tokens * width

    def seal(self, *, parts: int, retractions: int, stats: tuple[Stats, ...]) -> None:
        """Write the header, now that every row is there; raises OSError."""
        self._put(self._header(self._read_digest(), parts, retractions, stats), 0)
        os.fchmod(self._descriptor, FILE_MODE)

    def write_whole(self, sections: Sections, *, parts: int, retractions: int, stats: tuple[Stats, ...]) -> None:
        """Write all rows and the header at once; raises OSError.

        As `write` and `seal`, but the rows are not read back, and there is one system call instead of many: each
        return from one waits for the interpreter, which the engine's scheduler may be holding.
        """
        self._open()
        digest = xxhash.xxh3_64()
        for section in sections:
            digest.update(section)
        header = self._header(digest.hexdigest(), parts, retractions, stats)
        if os.pwritev(self._descriptor, (header, *sections), 0) == self._end:
            self._take(self._end)
        else:  # as much as one call takes, or as there is room for
            self._put(header, 0)
            self.write(0, self._tokens, sections)
        os.fchmod(self._descriptor, FILE_MODE)

    def publish(self) -> bool:
        """Give the file its name; False when a dump of that name was there already. Raises OSError."""
        self._take(self._promised)
        self._close()
        return self._folder.publish(self._hidden, self._request + DUMP_SUFFIX)

    def discard(self) -> None:
        """Remove the hidden file, if there is one."""
        promised, self._promised = self._promised, 0
        self._room.give_back(promised)
        if self._descriptor >= 0:
            self._close()
            self._folder.remove(self._hidden)

    def _open(self) -> None:
        if self._descriptor < 0:
            self._descriptor = self._folder.create(self._hidden)
            os.ftruncate(self._descriptor, self._end)

    def _put(self, data: bytes | memoryview, offset: int) -> None:
        write_all(self._descriptor, data, offset)
        self._take(len(data))

    def _header(self, digest: str, parts: int, retractions: int, stats: tuple[Stats, ...]) -> bytes:
        header = self._facts.header(
            self._request,
            self._tokens,
            self._weight_version,
            parts=parts,
            retractions=retractions,
            stats=stats,
            checksum=CHECKSUM_PREFIX + digest,
        )
        return header.encode(self._width)

    def _take(self, nbytes: int) -> None:
        taken = min(nbytes, self._promised)  # a row that is written again takes nothing
        self._promised -= taken
        self._room.take(taken)

    def _close(self) -> None:
        descriptor, self._descriptor = self._descriptor, -1
        os.close(descriptor)

    def _read_digest(self) -> str:
        digest = xxhash.xxh3_64()
        buffer = memoryview(bytearray(min(_READ_BYTES, self._end - self._width)))
        position = self._width
        while position < self._end:
            count = os.preadv(self._descriptor, [buffer[: self._end - position]], position)
            if count == 0:
                raise OSError(f"the hidden file of {self._request} was cut")
            digest.update(buffer[:count])
            position += count
        return digest.hexdigest()


def _pages(nbytes: int) -> int:
    return -(-nbytes // _PAGE) * _PAGE

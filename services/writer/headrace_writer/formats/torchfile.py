"""The file that `torch.save` makes of a dict of tensors, streamed and mapped without torch, and never unpickled.

Format: a ZIP archive without compression; `data.pkl` names the tensors, `data/{i}` holds the bytes of the i-th one
(https://docs.pytorch.org/docs/stable/notes/serialization.html, and torch/serialization.py for what a reader asks for).
The opcodes are those of `pickletools` at protocol 2, the only one that torch's restricted unpickler takes.
"""

from __future__ import annotations

import io
import struct
import zipfile
import zlib
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from itertools import accumulate
from math import prod
from typing import Any

from headrace.errors import Unreadable
from headrace.tensorfile import ITEM_SIZE
from headrace_writer.destination import CHUNK

Piece = bytes | memoryview

_ROOT = "row"  # every record lies in one folder, whatever its name
_STORAGES = {"I64": "LongStorage", "BF16": "BFloat16Storage", "F16": "HalfStorage", "F32": "FloatStorage"}
# As torch aligns them, so that a mapped tensor can be computed with.
_ALIGNMENT = 64
_PADDING_TAG = 0x4246  # torch's own tag for the padding of a record
_LOCAL_HEADER = struct.Struct("<4s22x2H")
_LOCAL_MAGIC = b"PK\3\4"
_ZIP64_EXTRA = 20
_ZIP64_FROM = 1 << 30
_MAX_SMALL = 1 << 20
# What ends the directory, and what an entry takes beside its name, extra and comment.
_END = struct.Struct("<4s4HL4xH")
_END_MAGIC = b"PK\5\6"
_ENTRY, _ENTRY_LENGTHS_AT, _ENTRY_LENGTHS = 46, 28, struct.Struct("<3H")
_FOLDER = 0x10
_HARMLESS_FLAGS = 0x808  # the sums follow the data; the name is UTF-8


@dataclass(frozen=True, slots=True, kw_only=True)
class Tensor:
    """A dense tensor by its key in the dict: dtype in safetensors' spelling, and shape."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of its data."""
        return ITEM_SIZE[self.dtype] * prod(self.shape)


def write_archive(
    file: io.RawIOBase, tensors: Sequence[tuple[Tensor, Iterable[Piece]]], notes: Mapping[str, bytes]
) -> None:
    """Write tensors, each with the pieces of its little-endian bytes, and `notes`, records that no loader looks at.

    `file` only appends, and tells its position.
    """
    with zipfile.ZipFile(file, "w") as archive:
        for name, content in {**_small([tensor for tensor, _ in tensors]), **notes}.items():
            _add(archive, file, name, len(content), [content])
        for index, (tensor, pieces) in enumerate(tensors):
            _add(archive, file, f"data/{index}", tensor.nbytes, pieces)


class Archive:
    """A file that `write_archive` made, over a map of it; what it gives are parts of the map."""

    def __init__(self, data: memoryview, notes: Set[str]) -> None:
        """Find the records, `notes` being those that no loader looks at; raises Unreadable.

        Torch reads a directory in a way of its own: it finds the first record of a name in any case, and leaves memory
        as it was for one that is marked as a folder. So nothing is taken that could be read in two ways.
        """
        self._data = data
        self._notes = notes
        try:
            with zipfile.ZipFile(_View(data)) as archive:
                entries = archive.infolist()
                _check_directory(data, archive.start_dir, entries)
        # What the module raises for directories that are damaged, beside its own error.
        except (zipfile.BadZipFile, NotImplementedError, OSError, ValueError, EOFError, struct.error) as error:
            raise Unreadable(f"no ZIP archive as torch.save writes it: {error}") from error
        # `filename` would end at a NUL, with which torch goes on.
        self._entries = {entry.orig_filename: entry for entry in entries}
        if len(self._entries) < len(entries):
            raise Unreadable("a record is there twice")

    def note(self, name: str) -> bytes:
        """A small record's content; raises Unreadable when there is none."""
        content = self._record(name)
        if len(content) > _MAX_SMALL:
            raise Unreadable(f"{len(content)} bytes are too many for {name}")
        return bytes(content)

    def tensors(self, expected: Sequence[Tensor]) -> list[memoryview]:
        """The data of the tensors, if torch would load exactly these from the file; else raises Unreadable."""
        if sum(tensor.nbytes for tensor in expected) > len(self._data):
            raise Unreadable(f"the file's {len(self._data)} bytes do not hold {_named(expected)}")
        for name, content in _small(expected).items():
            if self.note(name) != content:
                raise Unreadable(f"{name} is not that of {_named(expected)}")
        records = [f"data/{index}" for index in range(len(expected))]
        found = [self._record(name) for name in records]
        others = self._entries.keys() - {f"{_ROOT}/{name}" for name in (*_small(expected), *records, *self._notes)}
        if others:
            raise Unreadable(f"it holds {str(sorted(others))[:200]} besides what belongs there")
        for tensor, data in zip(expected, found, strict=True):
            if len(data) != tensor.nbytes:
                raise Unreadable(f"{tensor.name} takes {tensor.nbytes} bytes, the file holds {len(data)}")
        return found

    def check_sums(self) -> None:
        """Compare every record's content with its sum in the directory; raises Unreadable."""
        for name, entry in self._entries.items():
            if _crc32(self._record(name.removeprefix(f"{_ROOT}/"))) != entry.CRC:
                raise Unreadable(f"the content of {name} is not that which its sum was made of")

    def _record(self, name: str) -> memoryview:
        entry = self._entries.get(f"{_ROOT}/{name}")
        if entry is None:
            raise Unreadable(f"it holds no {name}")
        at = entry.header_offset
        header = self._data[at : at + _LOCAL_HEADER.size]
        stored = entry.compress_type == zipfile.ZIP_STORED and entry.compress_size == entry.file_size
        if len(header) < _LOCAL_HEADER.size or not stored or entry.flag_bits & ~_HARMLESS_FLAGS:
            raise Unreadable(f"the record {name} is damaged or compressed")
        magic, name_length, extra_length = _LOCAL_HEADER.unpack(header)
        begin = at + _LOCAL_HEADER.size + name_length + extra_length
        if magic != _LOCAL_MAGIC or begin + entry.file_size > len(self._data):
            raise Unreadable(f"the record {name} is not where the directory says")
        return self._data[begin : begin + entry.file_size]


class _View(io.RawIOBase):
    """A buffer as a file that can be read and sought, without a copy."""

    def __init__(self, data: memoryview) -> None:
        super().__init__()
        self._data = data
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        at = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: len(self._data)}[whence]
        if at < 0:
            raise ValueError(f"{at} lies before the file")
        self._at = at
        return at

    def readinto(self, buffer: Any) -> int:
        into = memoryview(buffer)
        part = self._data[self._at : self._at + len(into)]
        into[: len(part)] = part
        self._at += len(part)
        return len(part)


def _check_directory(data: memoryview, start: int, entries: Sequence[zipfile.ZipInfo]) -> None:
    """Raise Unreadable for a directory that `write_archive` does not make, but `zipfile` reads all the same."""
    size = 0
    for _ in entries:
        size += _ENTRY + sum(_ENTRY_LENGTHS.unpack_from(data, start + size + _ENTRY_LENGTHS_AT))
    magic, *facts = _END.unpack_from(data, len(data) - _END.size)
    if magic != _END_MAGIC or facts != [0, 0, len(entries), len(entries), size, 0]:
        raise Unreadable("the end of its directory is damaged")
    if min((entry.header_offset for entry in entries), default=0) != 0:
        raise Unreadable("its first record is not at its beginning")
    if any(entry.volume or entry.external_attr & _FOLDER for entry in entries):
        raise Unreadable("a record is marked as a folder, or as one of another volume")


def _named(tensors: Sequence[Tensor]) -> str:
    return ", ".join(f"{tensor.name} {tensor.dtype} {list(tensor.shape)}" for tensor in tensors)


def _crc32(data: memoryview) -> int:
    crc = 0
    for start in range(0, len(data), CHUNK):
        crc = zlib.crc32(data[start : start + CHUNK], crc)
    return crc


def _small(tensors: Sequence[Tensor]) -> dict[str, bytes]:
    """The records beside the data, in order: what torch looks for in an archive."""
    return {"data.pkl": _pickle(tensors), "version": b"3\n", "byteorder": b"little"}


def _add(archive: zipfile.ZipFile, file: io.RawIOBase, name: str, nbytes: int, pieces: Iterable[Piece]) -> None:
    entry = zipfile.ZipInfo(f"{_ROOT}/{name}")
    large = nbytes >= _ZIP64_FROM
    begin = file.tell() + _LOCAL_HEADER.size + len(entry.filename) + 4 + large * _ZIP64_EXTRA
    padding = -begin % _ALIGNMENT
    entry.extra = struct.pack("<2H", _PADDING_TAG, padding) + bytes(padding)
    with archive.open(entry, "w", force_zip64=large) as record:
        for piece in pieces:
            data = memoryview(piece).cast("B")
            # Summed, hashed and written a chunk at a time, while it is in the processor's cache.
            for start in range(0, len(data), CHUNK):
                record.write(data[start : start + CHUNK])


def _pickle(tensors: Sequence[Tensor]) -> bytes:
    """The dict of these tensors, each of which is rebuilt from the storage of its number."""
    items = b"".join(_text(tensor.name) + _tensor(index, tensor) for index, tensor in enumerate(tensors))
    return b"\x80\x02" + b"}" + b"(" + items + b"u" + b"."


def _tensor(index: int, tensor: Tensor) -> bytes:
    storage = (_text("storage"), _global("torch", _STORAGES[tensor.dtype]), _text(str(index)), _text("cpu"))
    strides = [*accumulate(reversed(tensor.shape[1:]), lambda stride, size: stride * size, initial=1)][::-1]
    arguments = (
        _tuple(*storage, _whole(prod(tensor.shape))) + b"Q",  # a persistent id: the loader finds the storage by it
        _whole(0),
        _tuple(*map(_whole, tensor.shape)),
        _tuple(*map(_whole, strides)),
        b"\x89",  # no gradient
        _global("collections", "OrderedDict") + b")R",  # no hooks
    )
    return _global("torch._utils", "_rebuild_tensor_v2") + _tuple(*arguments) + b"R"


def _text(text: str) -> bytes:
    data = text.encode()
    return b"X" + len(data).to_bytes(4, "little") + data


def _global(module: str, name: str) -> bytes:
    return f"c{module}\n{name}\n".encode()


def _tuple(*items: bytes) -> bytes:
    return b"(" + b"".join(items) + b"t"


def _whole(number: int) -> bytes:
    if number < 1 << 31:
        return b"J" + number.to_bytes(4, "little")
    return b"\x8a\x08" + number.to_bytes(8, "little")

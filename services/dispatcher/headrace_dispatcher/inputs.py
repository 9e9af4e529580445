"""The normalised samples of a run, in its destination under `inputs/`, read by ordinal."""

from __future__ import annotations

import os
import struct
from collections import Counter
from contextlib import ExitStack
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import orjson

from headrace.errors import Unavailable, Unreadable, UsageError
from headrace.manifest import INPUTS_FOLDER, SPEC_FILE
from headrace.masks import mask_length
from headrace.runs import RunSpec

SAMPLES_FILE, INDEX_FILE = "samples.jsonl", "samples.idx"
OFFSET = struct.Struct("<Q")
# Inside a JSON string the quotes would be escaped, so only a rejected sample's line has these bytes.
_REJECTED = b',"rejected":"'


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """A sample to extract: `ids` [N], and `mask` as run lengths over the same N tokens, zeros first."""

    ordinal: int
    sample: str
    ids: tuple[int, ...]
    mask: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RejectedSample:
    """A sample that is never sent, and why."""

    ordinal: int
    sample: str
    reason: str
    detail: str


class Inputs:
    """The normalised samples of one run, by ordinal; any number of threads may read at once.

    Memory does not depend on the number of samples: an access reads two offsets and one line.
    """

    def __init__(self, folder: Path, spec: RunSpec, samples: FileIO, index: FileIO) -> None:
        """Take over two open files; use `open`."""
        self.spec = spec
        self._folder = folder
        self._samples = samples
        self._index = index

    @classmethod
    def open(cls, output: Path) -> Inputs:
        """Open the inputs of the run whose dataset folder is `output`.

        Raises:
            UsageError: there are none.
            Unreadable: they are damaged, or of a newer schema than this code knows.
            Unavailable: they are there but cannot be read.
        """
        folder = output / INPUTS_FOLDER
        with ExitStack() as stack:
            try:
                spec = _decode_spec(folder / SPEC_FILE)
                samples = stack.enter_context(FileIO(folder / SAMPLES_FILE))
                index = stack.enter_context(FileIO(folder / INDEX_FILE))
                inputs = cls(folder, spec, samples, index)
                inputs._check()
            except (FileNotFoundError, NotADirectoryError) as error:
                name = Path(error.filename).name
                if name == SPEC_FILE:
                    raise UsageError(f"{output} holds no inputs of a run; submit the run file first") from error
                raise _damaged(folder, f"{name} is missing") from error
            except OSError as error:
                raise _unavailable(folder, error) from error
            stack.pop_all()
        return inputs

    def in_place(self) -> bool:
        """Whether the file that is read is still the one under its path: a folder may be removed or replaced."""
        try:
            return os.path.samestat(os.fstat(self._samples.fileno()), (self._folder / SAMPLES_FILE).stat())
        except OSError:
            return False

    def close(self) -> None:
        """Close the files; a read after it is a ValueError."""
        self._samples.close()
        self._index.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __len__(self) -> int:
        return self.spec.total

    def __getitem__(self, ordinal: int) -> Sample | RejectedSample:
        """The entry of an ordinal; raises IndexError beyond the last, Unreadable for a damaged entry."""
        if not 0 <= ordinal < len(self):
            raise IndexError(f"ordinal {ordinal} of {len(self)} samples")
        return _decode(self._line(ordinal), ordinal, self._folder)

    def rejected(self) -> Counter[str]:
        """Count the rejected samples by reason; reads every line but decodes only theirs."""
        counts: Counter[str] = Counter()
        for ordinal in range(len(self)):
            line = self._line(ordinal)
            if _REJECTED in line:
                entry = _decode(line, ordinal, self._folder)
                if isinstance(entry, RejectedSample):
                    counts[entry.reason] += 1
        return counts

    def _line(self, ordinal: int) -> bytes:
        begin, end = self._offset(ordinal), self._offset(ordinal + 1)
        line = self._read(self._samples, end - begin, begin) if begin < end else b""
        if len(line) != end - begin or not line.endswith(b"\n"):
            raise _damaged(self._folder, f"entry {ordinal} is torn")
        return line

    def _offset(self, ordinal: int) -> int:
        packed = self._read(self._index, OFFSET.size, ordinal * OFFSET.size)
        if len(packed) != OFFSET.size:
            raise _damaged(self._folder, "the index is cut")
        offset: int = OFFSET.unpack(packed)[0]
        return offset

    def _read(self, file: FileIO, size: int, offset: int) -> bytes:
        try:
            return os.pread(file.fileno(), size, offset)
        except OSError as error:
            raise _unavailable(self._folder, error) from error

    def _check(self) -> None:
        entries, rest = divmod(os.fstat(self._index.fileno()).st_size, OFFSET.size)
        if rest or entries != self.spec.total + 1:
            raise _damaged(self._folder, f"the index has {entries} offsets for {self.spec.total} samples")
        if self._offset(0) != 0 or self._offset(self.spec.total) != os.fstat(self._samples.fileno()).st_size:
            raise _damaged(self._folder, "the index does not end where the samples end")


def encode_entry(entry: Sample | RejectedSample) -> bytes:
    """Encode an entry as one line of JSON, its newline included."""
    table: dict[str, Any] = {"ordinal": entry.ordinal, "sample": entry.sample}
    if isinstance(entry, Sample):
        table |= {"ids": entry.ids, "mask": entry.mask}
    else:
        table |= {"rejected": entry.reason, "detail": entry.detail}
    return orjson.dumps(table) + b"\n"


def _decode_spec(path: Path) -> RunSpec:
    try:
        return RunSpec.decode(path.read_bytes())
    except Unreadable as error:
        raise Unreadable(f"{path}: {error}") from error


def _decode(line: bytes, ordinal: int, folder: Path) -> Sample | RejectedSample:
    try:
        table = orjson.loads(line)
        if table["ordinal"] != ordinal:
            raise _damaged(folder, f"entry {ordinal} says it is {table['ordinal']}")
        if "rejected" in table:
            return RejectedSample(
                ordinal=ordinal, sample=table["sample"], reason=table["rejected"], detail=table["detail"]
            )
        sample = Sample(ordinal=ordinal, sample=table["sample"], ids=tuple(table["ids"]), mask=tuple(table["mask"]))
        if not sample.ids or mask_length(sample.mask) != len(sample.ids):
            raise _damaged(folder, f"entry {ordinal} has {len(sample.ids)} ids and a mask of {sum(sample.mask)}")
    except (orjson.JSONDecodeError, KeyError, TypeError) as error:
        raise _damaged(folder, f"entry {ordinal}: {type(error).__name__}: {error}") from error
    return sample


def _unavailable(folder: Path, error: OSError) -> Unavailable:
    return Unavailable(f"{folder} cannot be read: {error.strerror}; make it readable and call again")


def _damaged(folder: Path, problem: str) -> Unreadable:
    return Unreadable(f"{folder} is damaged: {problem}; restore it or choose another output")

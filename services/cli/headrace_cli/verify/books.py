"""The books of a dataset: `headrace.json`, the inputs, the manifest's lines, and which rows lie in their places."""

from __future__ import annotations

import errno
import os
import re
from array import array
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from headrace.errors import Unavailable, Unreadable, UsageError
from headrace.finalnorm import FinalNorm
from headrace.ids import digest_ids
from headrace.manifest import (
    DATASET_FILE,
    INPUTS_FOLDER,
    MANIFEST_FOLDER,
    SEGMENT_SUFFIX,
    STATUSES,
    Dataset,
    Line,
    Status,
    decode_line,
    read_dataset,
)
from headrace.runs import Identity, RunSpec
from headrace_cli.verify.lines import is_time
from headrace_cli.verify.norm import find_norm
from headrace_cli.verify.problems import Findings, Kind
from headrace_dispatcher.inputs import Inputs, RejectedSample, Sample
from headrace_writer import formats

# Bits of a sample: one for each status that a line gives it, and one for a row in its place.
_BIT: dict[Status, int] = {status: 1 << index for index, status in enumerate(STATUSES)}
_ANY_LINE = sum(_BIT.values())
_ROW = 1 << len(STATUSES)
_OFFSET_BITS = 40
_NAMED_OPEN = 20
_OWNER_SCANS = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """A manifest line and its place: the segment's name and the line's number, from 1."""

    line: Line
    segment: str
    number: int

    @property
    def where(self) -> str:
        """The place as problems name it."""
        return f"{MANIFEST_FOLDER}/{self.segment}:{self.number}"


class Books:
    """What a dataset says of itself, in 13 bytes per sample; lines are read again when needed.

    A second, different line of a sample costs some hundred bytes more. `final_state` is that of the rows, `norm` the
    model's final norm where it is kept and sound.

    Segments are read here and not by `ManifestReader`, which tells no line's place.
    """

    def __init__(
        self, folder: Path, spec: RunSpec, identity: Identity | None, inputs: Inputs | None, findings: Findings
    ) -> None:
        """Take over what `open` found; nothing is read yet."""
        self.folder = folder
        self.spec = spec
        self.identity = identity
        self.inputs = inputs
        self.form = formats.get(spec.format)
        self.final_state = spec.stored_state
        self.norm: FinalNorm | None = None
        self._findings = findings
        self._bits = bytearray(spec.total)
        self._segments: list[str] = []
        self._place = array("q", bytes(8 * spec.total))
        self._number = array("I", bytes(4 * spec.total))
        self._more: dict[int, list[tuple[int, int]]] = {}
        self._scans = 0

    @classmethod
    def open(cls, folder: Path, findings: Findings) -> Books:
        """Read all books of a folder and add to `findings` what is wrong with them.

        Raises:
            UsageError: the folder holds no dataset, or one of a format that this headrace does not know.
            OSError: the folder itself cannot be read.
        """
        _check_folder(folder)
        dataset = _dataset(folder, findings)
        inputs = _inputs(folder, findings)
        spec = dataset.spec if dataset else inputs.spec if inputs else None
        if spec is None:
            why = "; ".join(f"{problem.where}: {problem.detail}" for problem in findings.problems)
            books_missing = f"holds no {DATASET_FILE} and no {INPUTS_FOLDER} that can be read"
            raise UsageError(f"{folder} {books_missing} ({why}); give a dataset's folder")
        if dataset and inputs and dataset.spec.digest != inputs.spec.digest:
            detail = "; ".join(dataset.spec.differences(inputs.spec))
            findings.add(Kind.DATASET, DATASET_FILE, f"another extraction than that of {INPUTS_FOLDER}: {detail}")
            if inputs.spec.total != dataset.spec.total:
                inputs.close()
                inputs = None
        try:
            books = cls(folder, spec, dataset.identity if dataset else None, inputs, findings)
            # Rows first: a writer at work makes the row before its line.
            books._find_rows()
            books._read_manifest()
            books._judge_lines()
            books._find_norm()
            if dataset is None and not findings.counts[Kind.DATASET]:
                books._judge_absent_dataset()
        except BaseException:
            if inputs is not None:
                inputs.close()
            raise
        return books

    def close(self) -> None:
        """Close the inputs."""
        if self.inputs is not None:
            self.inputs.close()

    def status(self, ordinal: int) -> Status | None:
        """The status that the lines give a sample; None without one, `stored` wins over the others."""
        return next((status for status, bit in _BIT.items() if self._bits[ordinal] & bit), None)

    def entries(self, ordinal: int) -> list[Entry]:
        """The lines of a sample, without repetitions, as they were met."""
        if not self._bits[ordinal] & _ANY_LINE:
            return []
        places = [(self._place[ordinal], self._number[ordinal]), *self._more.get(ordinal, ())]
        return [self._entry(place, number) for place, number in places]

    def sample(self, ordinal: int) -> Sample | RejectedSample | None:
        """What the inputs say of a sample; None, with a problem, where they are damaged."""
        if self.inputs is None:
            return None
        try:
            return self.inputs[ordinal]
        except (Unreadable, Unavailable) as error:
            self._findings.add(Kind.INPUTS, INPUTS_FOLDER, str(error), ordinal)
            return None

    def owner(self, token_ids: bytes) -> int | None:
        """The sample whose request proves these token ids (little-endian int64); None when no line names one.

        A scan of the manifest each time, and so only for the first hundred rows that are wrong.
        """
        if self._scans >= _OWNER_SCANS:
            return None
        self._scans += 1
        proof = f"-{len(token_ids) // 8}-{digest_ids(token_ids)}"
        for segment in self._segments:
            with suppress(OSError):  # found when the segment was read first
                for _, _, data in self._lines(segment):
                    if proof.encode() not in data:
                        continue
                    with suppress(Unreadable):
                        line = decode_line(data)
                        if line.request.endswith(proof):
                            return line.ordinal
        return None

    def _find_rows(self) -> None:
        root = self.folder / self.form.path(0).parts[0]
        for path in self._files_below(root):
            relative = path.relative_to(self.folder).as_posix()
            digits = re.findall(r"\d{1,18}", path.name)
            ordinal = int(digits[-1]) if digits else self.spec.total
            if ordinal < self.spec.total and str(self.form.path(ordinal)) == relative:
                self._bits[ordinal] |= _ROW
            else:
                self._findings.add(Kind.FOREIGN_FILE, relative, f"no row of this run of {self.spec.total} samples")

    def _files_below(self, root: Path) -> Iterator[Path]:
        """Everything that is no folder, links to folders too, in order; what cannot be read is a problem."""

        def add(error: OSError) -> None:
            self._add_unreadable(Path(error.filename).relative_to(self.folder).as_posix(), error)

        for folder, folders, files in os.walk(root, onerror=add):
            links = [name for name in folders if (Path(folder) / name).is_symlink()]
            folders.sort()
            for name in sorted(files + links):
                yield Path(folder) / name

    def _read_manifest(self) -> None:
        try:
            names = sorted(path.name for path in (self.folder / MANIFEST_FOLDER).iterdir())
        except OSError as error:
            self._add_unreadable(MANIFEST_FOLDER, error)
            return
        for name in names:
            if not name.endswith(SEGMENT_SUFFIX):
                continue
            self._segments.append(name)
            try:
                for number, offset, data in self._lines(name):
                    if not data.endswith(b"\n"):
                        where = f"{MANIFEST_FOLDER}/{name}:{number}"
                        self._findings.note(f"{where}: an unterminated tail of {len(data)} bytes is ignored")
                    elif data.strip():
                        self._take(name, number, offset, data)
            except OSError as error:
                self._add_unreadable(f"{MANIFEST_FOLDER}/{name}", error)

    def _lines(self, segment: str) -> Iterator[tuple[int, int, bytes]]:
        """Number, offset and bytes of a segment's lines, an unterminated tail too; raises OSError."""
        path, offset = self.folder / MANIFEST_FOLDER / segment, 0
        _check_regular(path)
        with path.open("rb") as file:
            for number, data in enumerate(file, start=1):
                yield number, offset, data
                offset += len(data)

    def _add_unreadable(self, where: str, error: OSError) -> None:
        # What is not there yet, or was taken away meanwhile, shows in the books; a link to nothing is no such thing.
        if not isinstance(error, FileNotFoundError):
            self._findings.add(Kind.UNREADABLE, where, error.strerror or str(error))

    def _take(self, segment: str, number: int, offset: int, data: bytes) -> None:
        where = f"{MANIFEST_FOLDER}/{segment}:{number}"
        try:
            line = decode_line(data)
        except Unreadable as error:
            self._findings.add(Kind.DAMAGED_LINE, where, str(error))
            return
        ordinal = line.ordinal
        if not 0 <= ordinal < self.spec.total:
            detail = f"a run of {self.spec.total} samples has none at this ordinal"
            self._findings.add(Kind.WRONG_LINE, where, detail, ordinal)
            return
        place = (len(self._segments) - 1) << _OFFSET_BITS | offset
        if not self._bits[ordinal] & _ANY_LINE:
            self._place[ordinal], self._number[ordinal] = place, number
        elif all(_content(line) != _content(entry.line) for entry in self.entries(ordinal)):
            self._more.setdefault(ordinal, []).append((place, number))
        self._bits[ordinal] |= _BIT[line.status]

    def _entry(self, place: int, number: int) -> Entry:
        segment = self._segments[place >> _OFFSET_BITS]
        with (self.folder / MANIFEST_FOLDER / segment).open("rb") as file:
            file.seek(place & (1 << _OFFSET_BITS) - 1)
            return Entry(line=decode_line(file.readline()), segment=segment, number=number)

    def _judge_lines(self) -> None:
        missing: list[int] = []
        absent = 0
        for ordinal, bits in enumerate(self._bits):
            if bits & _ROW and not bits & _BIT["stored"]:
                said = self.status(ordinal)
                detail = f"a row whose line says {said}" if said else "a row without a line"
                hint = "the line was lost, or a writer is just between the two; let the run finish and verify again"
                self._findings.add(Kind.LOST_LINE, str(self.form.path(ordinal)), f"{detail}: {hint}", ordinal)
            elif not bits & _ANY_LINE:
                absent += 1
                if len(missing) < _NAMED_OPEN:
                    missing.append(ordinal)
            # A sample that failed is tried again, and may be stored, or rejected, or fail again.
            if bits & _BIT["rejected"] and bits & _BIT["stored"]:
                entries = self.entries(ordinal)
                both = " and ".join(f"{entry.line.status} ({entry.where})" for entry in entries)
                self._findings.add(Kind.CONTRADICTION, entries[0].where, f"its lines say {both}", ordinal)
        if absent:
            more = ", ..." if absent > len(missing) else ""
            self._findings.note(f"{absent} samples have no line yet: {', '.join(map(str, missing))}{more}")

    def _find_norm(self) -> None:
        needed = self.spec.needs_norm and self._has_rows()
        self.norm = find_norm(self.folder, self.spec, self.identity, self._findings, needed=needed)

    def _has_rows(self) -> bool:
        return any(bits & (_ROW | _BIT["stored"]) for bits in self._bits)

    def _judge_absent_dataset(self) -> None:
        if self._has_rows():
            self._findings.add(Kind.DATASET, DATASET_FILE, "missing, though there are rows or lines of rows")
        else:
            self._findings.note(f"no {DATASET_FILE} yet: the dataset holds no row")


def _content(line: Line) -> Line:
    """A line but for its time, unless that is malformed: the check of the line must see it."""
    return replace(line, at="") if is_time(line.at) else line


def _check_folder(folder: Path) -> None:
    """Raise UsageError for what is no folder, OSError for one that cannot be listed and searched."""
    try:
        with os.scandir(f"{folder}/."):
            pass
    except (FileNotFoundError, NotADirectoryError):
        raise UsageError(f"{folder} is no folder; give a dataset's folder") from None


def _check_regular(path: Path) -> None:
    """Raise OSError for what is there but no file, nor a link to one: to open a pipe would wait for ever."""
    if os.path.lexists(path) and not path.is_file():
        raise OSError(errno.EINVAL, "is no regular file", str(path))


def _dataset(folder: Path, findings: Findings) -> Dataset | None:
    try:
        _check_regular(folder / DATASET_FILE)
        return read_dataset(folder)
    except Unreadable as error:
        findings.add(Kind.DATASET, DATASET_FILE, str(error))
    except OSError as error:
        findings.add(Kind.DATASET, DATASET_FILE, error.strerror or str(error))
    return None


def _inputs(folder: Path, findings: Findings) -> Inputs | None:
    try:
        return Inputs.open(folder)
    except (UsageError, Unreadable, Unavailable) as error:
        findings.add(Kind.INPUTS, INPUTS_FOLDER, str(error))
    return None

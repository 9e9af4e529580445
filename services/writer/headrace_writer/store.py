"""Stores one dump as one row with one line, from wherever an earlier writer stopped: the line, the row, the dump."""

from __future__ import annotations

import os
import stat
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path

from headrace.dumpfolder import read_dump
from headrace.errors import Unavailable, Unreadable, UsageError
from headrace.ids import RequestId
from headrace.manifest import Line
from headrace.masks import mask_length
from headrace.messages import Record, StoreJob
from headrace.runs import Identity, RunSpec
from headrace.verdicts import Reason, Refusal, Requirement, judge
from headrace_writer import formats
from headrace_writer.dataset import ensure_dataset, find_dataset
from headrace_writer.destination import Destination, guard
from headrace_writer.formats.base import NotFinite
from headrace_writer.lines import later, line_of_row, line_without_row
from headrace_writer.manifest import ManifestIndex, ManifestWriter
from headrace_writer.norm import NormKeeper, require_torch
from headrace_writer.rows import Due, StoredRow, adopt_row, publish_row
from headrace_writer.source import open_source

_ROUNDS = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Stored:
    """The row and its line are there and last; `already`: both were, `adopted`: the row was."""

    line: Line
    adopted: bool = False
    already: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Refused:
    """The dump cannot become a row; nothing was published."""

    refusal: Refusal


@dataclass(frozen=True, slots=True, kw_only=True)
class DumpGone:
    """Neither row nor dump is there: the sample needs another attempt."""


Outcome = Stored | Refused | DumpGone


class Store:
    """One writer's access to one run's dataset. Several may work on the same ordinal at once."""

    def __init__(self, folder: Path, spec: RunSpec, writer: str, index: ManifestIndex | None = None) -> None:
        """Open the dataset's folder, made if need be; `writer` names this life of the process.

        `index` is that of an earlier store of this run, which need not read the manifest again. It may say too much or
        too little of a folder that was replaced: what it says is looked up, and a line that is repeated does no harm.

        Raises:
            Conflict: the folder holds another extraction, or a living process has this writer's name.
            UsageError: the run's format is unknown, or takes what is not installed.
            Unreadable: `headrace.json` is damaged.
            DestinationFull, Unavailable: the folder cannot be used now.
        """
        self._form = formats.get(spec.format)
        require_torch(spec)
        self._spec = spec
        find_dataset(folder, spec)
        self._destination = Destination(folder, writer)
        self._norm = NormKeeper(self._destination, spec)
        self._manifest = ManifestWriter(folder, writer)
        self._index = ManifestIndex(folder, spec.total) if index is None else index

    def close(self) -> None:
        """Close the segment and remove the scratch folder."""
        self._manifest.close()
        self._destination.close()

    def store(self, job: StoreJob, dump_path: Path, at: datetime) -> Outcome:
        """Bring one captured sample to its end: a row in its place and a line that names it.

        Args:
            job: what the watcher asked for.
            dump_path: where the request's dump lies, if it is still there.
            at: the time for the line.

        Raises:
            UsageError: the job is not one of this run.
            Conflict, Unreadable: the folder holds another extraction, or a damaged `headrace.json`.
            DestinationFull, Unavailable: the folder cannot be used now; the same call goes on later.
            All of them: the run's final norm cannot be had, see `NormKeeper.find`.
        """
        self._check(job)
        find_dataset(self._destination.folder, self._spec)
        line = self._committed(job.id.ordinal)
        if line is not None:
            return Stored(line=line, already=True)
        for _ in range(_ROUNDS):
            adopted = self._from_row(job)
            if isinstance(adopted, StoredRow):
                return Stored(line=self._append(_due(job), adopted, at), adopted=True)
            if adopted is not None:
                return adopted
            made = self._from_dump(job, dump_path)
            if isinstance(made, StoredRow):
                return Stored(line=self._append(_due(job), made, at))
            if made is not None:
                return made
            # Another writer was first: its row is looked at like any other.
        raise Unavailable(f"{self._form.path(job.id.ordinal)} is taken by wrong rows again and again; who writes them?")

    def record(self, records: Sequence[Record], at: datetime) -> list[Line]:
        """Append the lines of rejected and failed samples that have none yet.

        A failed sample whose row is there is stored: its writer died before the line, and its dump was lost after. One
        that was tried again and failed with another request gets another line.

        Returns:
            The line that now holds for each sample, once: a stored row's wins over a rejected sample's, and that over
            a failed one's.

        Raises:
            UsageError: an ordinal or a request is not one of this run.
            Conflict, Unreadable: the folder holds another extraction, or a damaged `headrace.json`.
            DestinationFull, Unavailable: the folder cannot be used now; the same call goes on later.
        """
        wanted = {entry.ordinal: entry for entry in records}
        for entry in wanted.values():
            self._check_record(entry)
        find_dataset(self._destination.folder, self._spec)
        self._index.refresh()
        known = {ordinal for ordinal in wanted if self._index.status(ordinal) is not None}
        found = self._index.find_all(known) if known else {}
        if found:
            self._index.make_last()
        lines = {ordinal: self._recorded(entry, found.get(ordinal, []), at) for ordinal, entry in wanted.items()}
        self._manifest.append(*(line for ordinal, line in lines.items() if line not in found.get(ordinal, [])))
        return list(lines.values())

    def _check(self, job: StoreJob) -> None:
        if job.id.run != self._spec.run:
            raise UsageError(f"{job.request} is not a request of run {self._spec.run}")
        if mask_length(job.mask) != job.id.tokens:
            raise UsageError(f"{job.request}: the mask covers {mask_length(job.mask)} tokens")
        self._check_ordinal(job.id.ordinal)

    def _check_record(self, entry: Record) -> None:
        self._check_ordinal(entry.ordinal)
        if not entry.mask:
            return
        request = RequestId.parse(entry.request)
        if (request.run, request.ordinal) != (self._spec.run, entry.ordinal):
            raise UsageError(f"{entry.request} is not a request of ordinal {entry.ordinal} of run {self._spec.run}")
        if mask_length(entry.mask) != request.tokens:
            raise UsageError(f"{entry.request}: the mask covers {mask_length(entry.mask)} tokens")

    def _check_ordinal(self, ordinal: int) -> None:
        if not 0 <= ordinal < self._spec.total:
            raise UsageError(f"run {self._spec.run} has {self._spec.total} samples, none at ordinal {ordinal}")

    def _committed(self, ordinal: int) -> Line | None:
        """The line that names the row which is there, by size."""
        self._index.refresh()
        if self._index.status(ordinal) != "stored":
            return None
        line = self._matching(self._index.find(ordinal))
        if line is not None:
            self._index.make_last()
        return line

    def _matching(self, lines: Sequence[Line]) -> Line | None:
        """Of one sample's lines that which the row's file agrees with."""
        stored = [line for line in lines if line.status == "stored"]
        if not stored:
            return None
        path = self._form.path(stored[0].ordinal)
        with guard(self._destination.folder):
            try:
                found = (self._destination.folder / path).lstat()
            except FileNotFoundError:
                return None
        size = found.st_size if stat.S_ISREG(found.st_mode) else None
        return next((line for line in stored if (line.path, line.bytes) == (str(path), size)), None)

    def _recorded(self, entry: Record, found: Sequence[Line], at: datetime) -> Line:
        """The line that holds for a sample with these lines: one of them, or a new one."""
        line = self._matching(found)
        if line is not None:
            return line
        if entry.mask:
            due = Due(request=RequestId.parse(entry.request), sample=entry.sample, mask=entry.mask)
            row = self._adopt(due, None)
            if isinstance(row, StoredRow):
                return line_of_row(self._spec, due, row, at)
        for status in ("stored", "rejected"):
            known = [line for line in found if line.status == status]
            if known:
                return known[-1]
        same = [line for line in found if (line.status, line.request) == (entry.status, entry.request)]
        return same[-1] if same else line_without_row(self._spec, entry, later(found, at))

    def _from_row(self, job: StoreJob) -> StoredRow | Refused | None:
        return self._adopt(_due(job), Identity(engine=job.engine, weight_version=job.weight_version))

    def _adopt(self, due: Due, first: Identity | None) -> StoredRow | Refused | None:
        """Take over a row that is there; None when there is none, or a wrong one was.

        Where no `headrace.json` says whose rows these are, `first` does; without either no row is taken over.
        """
        if not os.path.lexists(self._destination.folder / self._form.path(due.request.ordinal)):
            return None
        # Read after the row was seen: `headrace.json` comes before any row.
        identity = self._identity(first)
        if identity is None:
            return None
        row = adopt_row(self._destination, self._form, due, Requirement.of(self._spec, identity, stored=True))
        if row is None:
            return None
        dataset = ensure_dataset(self._destination, self._spec, identity)
        return Refused(refusal=dataset) if isinstance(dataset, Refusal) else row

    def _from_dump(self, job: StoreJob, dump_path: Path) -> StoredRow | Refused | DumpGone | None:
        """Make the row from the dump; None when the row's place is taken."""
        try:
            dump = read_dump(dump_path)
            identity = self._identity(Identity(engine=job.engine, weight_version=job.weight_version))
            verdict = judge(dump, job.id, Requirement.of(self._spec, identity))
            if isinstance(verdict, Refusal):
                return Refused(refusal=verdict)
            source = open_source(dump_path, dump, job)
        except FileNotFoundError:
            return DumpGone()
        except Unreadable as error:
            return Refused(refusal=Refusal(reason=Reason.UNREADABLE, detail=str(error)))
        if isinstance(source, Refusal):
            return Refused(refusal=source)
        dataset = ensure_dataset(self._destination, self._spec, verdict.identity)
        if isinstance(dataset, Refusal):
            return Refused(refusal=dataset)
        norm = self._norm.find(dump_path.parent, verdict.identity)
        try:
            return publish_row(self._destination, self._form, replace(source, norm=norm))
        except NotFinite as error:
            return Refused(refusal=Refusal(reason=Reason.NOT_FINITE, detail=str(error)))

    def _identity(self, first: Identity | None) -> Identity | None:
        dataset = find_dataset(self._destination.folder, self._spec)
        return first if dataset is None else dataset.identity

    def _append(self, due: Due, row: StoredRow, at: datetime) -> Line:
        """Append the row's line, unless an equal one is there."""
        # A writer that stood still for longer than its lease was overtaken by another one, line and all.
        line = line_of_row(self._spec, due, row, at)
        self._index.refresh()
        if self._index.status(line.ordinal) == "stored":
            for known in self._index.find(line.ordinal):
                if replace(known, at=line.at) == line:
                    self._index.make_last()
                    return known
        self._manifest.append(line)
        return line


def _due(job: StoreJob) -> Due:
    return Due(request=job.id, sample=job.sample, mask=job.mask)


def finish(dump_path: Path) -> None:
    """Remove a dump whose sample is marked as stored; one that is gone is fine."""
    dump_path.unlink(missing_ok=True)

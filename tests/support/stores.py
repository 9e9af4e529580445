"""Samples, jobs and checks for tests of the writer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import xxhash

from headrace.bus.values import Attempt
from headrace.dumpfolder import read_dump
from headrace.finalnorm import FinalNorm
from headrace.ids import RequestId
from headrace.manifest import INPUTS_FOLDER, SPEC_FILE, Damage, Line, ManifestReader
from headrace.masks import decode_mask, encode_mask
from headrace.messages import StoreJob
from headrace.runs import RunSpec
from headrace_writer import formats
from headrace_writer.formats.base import RowSource
from headrace_writer.source import open_source
from tests.support import bus_values
from tests.support.dumps import ENGINE, MODEL, WEIGHTS, make_dump

RUN, BOUNDARIES, HIDDEN = "tale", (2, 4, 6), 16
AT = datetime(2026, 7, 23, 10, 15, tzinfo=UTC)


def make_spec(output: Path, **changes: Any) -> RunSpec:
    """The spec of a run of 100 samples; `changes` replaces fields."""
    shape = {"boundaries": BOUNDARIES, "hidden_size": HIDDEN, "engine_model": MODEL}
    return bus_values.make_spec(**{"run": RUN, "total": 100, "output": str(output), **shape, **changes})


def submit_to(output: Path, **changes: Any) -> RunSpec:
    """The spec of a run whose inputs lie in its folder, as far as a writer looks at them."""
    spec = make_spec(output, **changes)
    (output / INPUTS_FOLDER).mkdir(parents=True, exist_ok=True)
    (output / INPUTS_FOLDER / SPEC_FILE).write_bytes(spec.encode())
    return spec


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """A sample of the run, and its attempts."""

    ordinal: int
    token_ids: tuple[int, ...]

    @property
    def name(self) -> str:
        """The id that its user gave it."""
        return f"sample-{self.ordinal}"

    @property
    def mask(self) -> tuple[int, ...]:
        """Its loss mask as run lengths: the second half is trained."""
        half = len(self.token_ids) // 2
        return encode_mask([0] * half + [1] * (len(self.token_ids) - half))

    def request(self, attempt: int = 0) -> RequestId:
        """The id of an attempt."""
        return RequestId.make(RUN, self.ordinal, f"nonce{attempt:03d}", self.token_ids)

    def opened(self, attempt: int = 0) -> Attempt:
        """An attempt as a dispatcher records it."""
        request = self.request(attempt)
        return Attempt(
            ordinal=self.ordinal,
            request=str(request),
            tokens=request.tokens,
            dump_bytes=4096,
            sample=self.name,
            mask=self.mask,
        )

    def job(self, attempt: int = 0, **changes: Any) -> StoreJob:
        """The job that stores an attempt; `changes` replaces fields."""
        job = StoreJob(
            request=str(self.request(attempt)),
            sample=self.name,
            job=1,
            mask=self.mask,
            engine=ENGINE,
            weight_version=WEIGHTS,
        )
        return replace(job, **changes)

    def dump(self, folder: Path, attempt: int = 0, **options: Any) -> Path:
        """The dump of an attempt; attempts differ in their states, as bf16 does between batches."""
        options = {"seed": 10 * attempt, **options}
        return make_dump(folder, self.request(attempt), self.token_ids, BOUNDARIES, HIDDEN, **options)


def row_source(folder: Path, sample: Sample, norm: FinalNorm | None = None, **dump: Any) -> RowSource:
    """The source of a row: a dump of the sample, opened as a writer opens it."""
    path = sample.dump(folder, **dump)
    source = open_source(path, read_dump(path), sample.job())
    assert isinstance(source, RowSource)
    return replace(source, norm=norm)


def make_sample(ordinal: int = 7, tokens: int = 12) -> Sample:
    """A sample whose ids tell it from every other."""
    return Sample(ordinal=ordinal, token_ids=tuple(1000 * ordinal + i for i in range(tokens)))


def lines_of(folder: Path) -> list[Line]:
    """Every line of a manifest; none may be damaged."""
    lines = []
    for line in ManifestReader(folder).read_new():
        assert not isinstance(line, Damage)
        lines.append(line)
    return lines


def row_files(folder: Path) -> list[str]:
    """Every file under `rows`, relative to the folder."""
    return sorted(str(path.relative_to(folder)) for path in (folder / "rows").rglob("*") if not path.is_dir())


def assert_stored(folder: Path, samples: Sequence[Sample]) -> None:
    """Exactly these samples have a row, it is theirs, and a line matches the file."""
    form = formats.get("headrace")
    assert row_files(folder) == sorted(str(form.path(sample.ordinal)) for sample in samples)
    lines = lines_of(folder)
    for sample in samples:
        path = folder / form.path(sample.ordinal)
        row = form.read(path)
        assert sample.request().proves(row.token_ids)
        assert row.loss_mask == decode_mask(sample.mask)
        assert row.aux.info.shape == (len(sample.token_ids), len(BOUNDARIES) * HIDDEN)
        data = path.read_bytes()
        checksum = "xxh3:" + xxhash.xxh3_64_hexdigest(data)
        found = {(line.ordinal, line.sample, line.status, line.path, line.bytes, line.checksum) for line in lines}
        assert (sample.ordinal, sample.name, "stored", str(form.path(sample.ordinal)), len(data), checksum) in found

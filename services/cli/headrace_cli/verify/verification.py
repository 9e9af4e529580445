"""Verifies a dataset from its folder alone: books, then every row, then the states themselves."""

from __future__ import annotations

import json
import math
import os
import time
from array import array
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from headrace.errors import Unavailable, UsageError
from headrace.finalnorm import NORM_FILE, FinalNorm
from headrace.runs import RunSpec
from headrace_cli.verify.books import Books
from headrace_cli.verify.lines import line_fault
from headrace_cli.verify.problems import Findings, Kind
from headrace_cli.verify.report import Ranks, Recomputed, Report
from headrace_cli.verify.rows import check_row
from headrace_cli.verify.sampling import choose
from headrace_dispatcher.checkpoint import checkpoint_digest

_GIVE_MODEL = "give the checkpoint with --model"


def verify(
    folder: Path,
    *,
    model: Path | None,
    sample: int,
    all_rows: bool,
    semantic: bool,
    tolerance: float | None,
    progress: Callable[[int, int], None] | None,
) -> Report:
    """Verify a dataset; nothing is written.

    Args:
        folder: the dataset's.
        model: the checkpoint to recompute with; by default the one that rendered the samples, if it is here.
        sample: how many rows to recompute, spread over lengths and ordinals.
        all_rows: recompute every row instead.
        semantic: whether the same rows' next tokens are ranked with the model's head.
        tolerance: the relative error that recomputed states may have, instead of those by dtype.
        progress: called with steps done and in all.

    Raises:
        UsageError: the folder holds no dataset; the tolerance is no finite number above 0; the model that was asked
            for cannot be used, or needs an extra.
        Unavailable: the folder cannot be read.
    """
    if tolerance is not None and not (math.isfinite(tolerance) and tolerance > 0):
        raise UsageError(f"tolerance {tolerance}: give a finite number above 0, or none for that of the dtype")
    try:
        return _Verification(folder, progress).run(model, sample, all_rows, semantic, tolerance)
    except OSError as error:
        raise Unavailable(f"{error.filename or folder}: {error.strerror or error}; make it readable") from error


class _Verification:
    """One verification: what was found so far, and how far it is."""

    def __init__(self, folder: Path, progress: Callable[[int, int], None] | None) -> None:
        self._folder = folder
        self._progress = progress
        self._findings = Findings()
        self._done = self._steps = 0
        self._rows = self._bytes = 0
        self._seconds = 0.0

    def run(self, model: Path | None, sample: int, all_rows: bool, semantic: bool, tolerance: float | None) -> Report:
        books = Books.open(self._folder, self._findings)
        try:
            spec = books.spec
            wanted = spec.total if all_rows else min(sample, spec.total)
            checkpoint = self._checkpoint(model, spec, required=all_rows) if wanted else None
            phases = (1 + semantic) if checkpoint else 0
            self._steps = spec.total + phases * wanted
            counts, sound = self._check_rows(books)
            chosen = choose(sound, wanted)
            self._steps = spec.total + phases * len(chosen)
            recomputed = ranks = None
            if checkpoint is not None and chosen:
                required = model is not None or all_rows
                recomputed = self._recompute(books, checkpoint, chosen, tolerance, required=required)
                if semantic:
                    ranks = self._rank(books, checkpoint, chosen)
            if checkpoint is not None and books.norm is not None:
                self._compare_norm(books.norm, checkpoint)
            return self._report(books, counts, str(checkpoint or ""), recomputed, ranks)
        finally:
            books.close()

    def _checkpoint(self, model: Path | None, spec: RunSpec, *, required: bool) -> Path | None:
        folder = model or Path(spec.model)
        if not (folder / "config.json").is_file():
            if model is not None:
                raise UsageError(f"{folder} is no checkpoint folder: it has no config.json; give one with --model")
            self._not_done("states not recomputed", f"{folder} is not here; {_GIVE_MODEL}", required=required)
            return None
        if checkpoint_digest(folder) != spec.model_digest:
            other = f"{folder} holds other files than the run's checkpoint did"
            if model is None:  # somebody may have put another model there
                self._not_done("states not recomputed", f"{other}; {_GIVE_MODEL}", required=required)
                return None
            self._findings.note(f"{other}: recomputed with it all the same")
        return folder

    def _check_rows(self, books: Books) -> tuple[Counter[str], array[int]]:
        """Check every sample's lines and row; give the counts by status, and each sound row's tokens by ordinal."""
        counts: Counter[str] = Counter()
        sound = array("I", bytes(4 * books.spec.total))
        started = time.perf_counter()
        for ordinal in range(books.spec.total):
            status = books.status(ordinal)
            counts[status or "open"] += 1
            if status is not None:
                sound[ordinal] = self._check_sample(books, ordinal)
            self._step()
        self._seconds = time.perf_counter() - started
        return counts, sound

    def _check_sample(self, books: Books, ordinal: int) -> int:
        sample = books.sample(ordinal)
        judged = [
            (entry, line_fault(books.spec, books.form, ordinal, entry.line, sample)) for entry in books.entries(ordinal)
        ]
        for entry, fault in judged:
            if fault is not None:
                self._findings.add(Kind.WRONG_LINE, entry.where, fault, ordinal)
        stored = [entry for entry, _ in judged if entry.line.status == "stored"]
        sound = [entry for entry, fault in judged if entry.line.status == "stored" and fault is None]
        if not stored:
            return 0
        # A wrong line, of another run say, must not speak for the row where another one can.
        checked = check_row(books, ordinal, sound or stored, sample)
        for kind, detail in checked.faults:
            self._findings.add(kind, str(books.form.path(ordinal)), detail, ordinal)
        self._rows += checked.size > 0
        self._bytes += checked.size
        return checked.tokens if sound else 0

    def _recompute(
        self, books: Books, model: Path, chosen: list[int], tolerance: float | None, *, required: bool
    ) -> Recomputed | None:
        if not required and _float32_bytes(model) > _memory():
            self._findings.note(f"states not recomputed: {model} does not fit this machine in float32; see --model")
            return None
        try:
            with _needs_extra():
                from headrace_cli.verify.recompute import Recomputation
            recomputation = Recomputation(model, books, tolerance, self._findings)
        except UsageError as error:
            self._not_done("states not recomputed", str(error), required=required)
            return None
        started = time.perf_counter()
        recomputation.run(chosen, self._step)
        return recomputation.finish(time.perf_counter() - started)

    def _rank(self, books: Books, model: Path, chosen: list[int]) -> Ranks | None:
        try:
            with _needs_extra():
                from headrace_cli.verify.head import Head
                from headrace_cli.verify.semantic import NextTokens
            next_tokens = NextTokens(Head(model, books.spec.hidden_size, books.final_state), books, self._findings)
        except UsageError as error:
            self._not_done("next tokens not ranked", str(error), required=False)
            return None
        started = time.perf_counter()
        next_tokens.run(chosen, self._step)
        return next_tokens.finish(time.perf_counter() - started)

    def _compare_norm(self, norm: FinalNorm, model: Path) -> None:
        try:
            with _needs_extra():
                from headrace_cli.verify.head import norm_difference
            difference = norm_difference(norm, model)
        except UsageError as error:
            self._not_done(f"{NORM_FILE} not compared with the checkpoint's", str(error), required=False)
            return
        if difference is not None:
            self._findings.add(Kind.DATASET, NORM_FILE, f"not the final norm of {model}: {difference}")

    def _not_done(self, what: str, why: str, *, required: bool) -> None:
        if required:
            raise UsageError(f"{what}: {why}")
        self._findings.note(f"{what}: {why}")

    def _step(self) -> None:
        self._done += 1
        if self._progress is not None:
            self._progress(min(self._done, self._steps), self._steps)

    def _report(
        self, books: Books, counts: Counter[str], model: str, recomputed: Recomputed | None, ranks: Ranks | None
    ) -> Report:
        if self._progress is not None:
            self._progress(self._steps, self._steps)
        return Report(
            folder=str(self._folder),
            run=books.spec.run,
            total=books.spec.total,
            stored=counts["stored"],
            rejected=counts["rejected"],
            failed=counts["failed"],
            open=counts["open"],
            rows=self._rows,
            bytes=self._bytes,
            seconds=self._seconds,
            model=model,
            recomputed=recomputed,
            ranks=ranks,
            problems=tuple(self._findings.problems),
            counts=dict(self._findings.counts),
            notes=tuple(self._findings.notes),
        )


@contextmanager
def _needs_extra() -> Iterator[None]:
    """Import inside this block what the extra brings; raises UsageError where it is not there, or not whole."""
    try:
        yield
    except Exception as error:  # a torch that is half installed, or fits not the rest, raises anything
        cause = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        again = "" if isinstance(error, ModuleNotFoundError) else " --force-reinstall"
        raise UsageError(f"{cause}; install it with: pip install{again} 'headrace[verify]'") from error


def _float32_bytes(model: Path) -> int:
    """At most so many bytes a checkpoint takes in float32: its files hold float32, or twice as many weights."""
    try:
        config = json.loads((model / "config.json").read_bytes())
        factor = 1 if "float32" in (config.get("dtype"), config.get("torch_dtype")) else 2
    except (ValueError, AttributeError):
        factor = 2
    return factor * sum(path.stat().st_size for path in model.glob("*.safetensors"))


def _memory() -> int:
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")

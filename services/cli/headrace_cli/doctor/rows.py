"""Looks at the rows that the canaries became: the pipeline's own verification, and the kind of their final state."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt

from headrace.dumpfolder import read_norm
from headrace.errors import VerificationFailed
from headrace.finalnorm import NORM_FILE, FinalNorm
from headrace.runs import RunSpec
from headrace.tensorfile import TensorInfo
from headrace_cli.console import human_bytes
from headrace_cli.doctor.findings import Finding, unchecked, well, wrong
from headrace_cli.doctor.ranks import final_kind
from headrace_cli.verify import Report, verify
from headrace_writer import formats
from headrace_writer.formats.base import Row, as_float32

_BY_HAND = "call the doctor with --keep, then headrace verify DIR --all --model CHECKPOINT where it fits"


def verified(spec: RunSpec, not_recomputed: str) -> Iterator[Finding]:
    """What `headrace verify` says of the run's dataset; with `not_recomputed`, the reason, no state is recomputed."""
    sample = 0 if not_recomputed else spec.total
    report = verify(
        Path(spec.output), model=None, sample=sample, all_rows=False, semantic=False, tolerance=None, progress=None
    )
    if not report.ok:
        first = report.problems[0]
        fix = f"{first.kind}: {first.detail}; do not train on what this engine gives"
        yield wrong(f"rows: {sum(report.counts.values())} problems", fix, VerificationFailed)
        return
    yield well(f"rows: {report.rows} read back, {human_bytes(report.bytes)}, as headrace verify wants them")
    yield _recomputed(report, not_recomputed)


def _recomputed(report: Report, not_recomputed: str) -> Finding:
    done = report.recomputed
    if done is None or not done.worst:
        why = not_recomputed or "; ".join(report.notes)
        return unchecked("that each state is its boundary's", f"{why}; {_BY_HAND}")
    worst = max(done.worst, key=lambda state: state.median)
    nearest = min(state.nearest for state in done.worst)
    off = f"off by {worst.median:.1e} at most ({worst.name}), the nearest other boundary by {nearest:.1e}"
    return well(f"states recomputed in float32 from {report.model}: {off}")


def kind_of_final(spec: RunSpec) -> Finding:
    """Whether the final states are of the run's kind, by the norm that the engine published.

    Raises:
        Unreadable: a row or the norm cannot be read.
    """
    what = f"that the final state is {spec.final_state}"
    try:
        norm = read_norm(Path(spec.output) / NORM_FILE)
    except FileNotFoundError:
        return unchecked(what, "the engine publishes no final norm to tell it by")
    weight = as_float32(_info(norm), memoryview(norm.weight))
    if not np.abs(weight).min() > 0:
        return unchecked(what, "the final norm has weights of zero, by which nothing can be told")
    ratios = np.concatenate([_ratios(read_row(spec, ordinal), weight) for ordinal in range(spec.total)])
    fits, middle = final_kind(spec.final_state, ratios)
    return Finding(
        what=f"final states are {spec.final_state}: without the norm's weight of size {middle:.3g}, post-norm has 1",
        ok=fits,
        fix="the engine says one kind and captures another: mend HEADRACE_CAPTURE_FINAL_STATE, or report it",
        error=VerificationFailed,
    )


def read_row(spec: RunSpec, ordinal: int) -> Row:
    """Read one row of the run; raises Unreadable."""
    form = formats.get(spec.format)
    return form.read(Path(spec.output) / form.path(ordinal))


def _info(norm: FinalNorm) -> TensorInfo:
    return TensorInfo(dtype=norm.dtype, shape=(norm.hidden_size,), begin=0, end=len(norm.weight))


def _ratios(row: Row, weight: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    states = as_float32(row.final.info, row.final.buffer)
    ratios: npt.NDArray[np.float32] = np.sqrt(np.square(states / weight).mean(axis=-1))
    return ratios

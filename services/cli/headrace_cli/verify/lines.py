"""Checks a manifest line against the run's spec and the inputs."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime

from headrace.errors import InvalidId
from headrace.ids import RequestId, encode_ids
from headrace.manifest import Line
from headrace.runs import RunSpec
from headrace_dispatcher.inputs import RejectedSample, Sample
from headrace_writer.formats.base import Format

# The one proof that this version writes: by token ids.
PROOF = "ids"
_AT = "%Y-%m-%dT%H:%M:%SZ"


def line_fault(
    spec: RunSpec, form: Format, ordinal: int, line: Line, sample: Sample | RejectedSample | None
) -> str | None:
    """Say what a sample's line gets wrong, None for nothing; `sample` is None where the inputs cannot be read."""
    problems = [*_against_run(spec, form, ordinal, line)]
    if sample is not None:
        problems += _against_inputs(line, sample)
    return "; ".join(problems) or None


def is_time(at: str) -> bool:
    """Whether a line's `at` has the one form that is written: UTC to the second, `2026-01-31T23:59:59Z`."""
    try:
        return datetime.fromisoformat(at).strftime(_AT) == at
    except ValueError:
        return False


def _against_run(spec: RunSpec, form: Format, ordinal: int, line: Line) -> Iterator[str]:
    if line.boundaries != spec.boundaries:
        yield f"boundaries {list(line.boundaries)}, the run has {list(spec.boundaries)}"
    if not is_time(line.at):
        yield f"at {line.at!r}, expected UTC like 2026-01-31T23:59:59Z"
    if line.request or line.status == "stored":
        yield from _request(spec, ordinal, line)
    if line.status == "stored":
        path = str(form.path(ordinal))
        if line.path != path:
            yield f"path {line.path!r}, the ordinal's is {path}"
        if line.proof != PROOF:
            yield f"proof {line.proof!r}, expected {PROOF!r}"
        if line.reason:
            yield f"stored, and yet with the reason {line.reason!r}"
        return
    if (line.path, line.bytes, line.checksum) != ("", 0, ""):
        yield f"{line.status}, and yet it names the file {line.path!r}"
    if not line.reason:
        yield f"{line.status} without a reason"


def _request(spec: RunSpec, ordinal: int, line: Line) -> Iterator[str]:
    try:
        request = RequestId.parse(line.request)
    except InvalidId as error:
        yield str(error)
        return
    if (request.run, request.ordinal) != (spec.run, ordinal):
        yield f"request {line.request} is not one of run {spec.run!r}, ordinal {ordinal}"
    if line.status == "stored" and request.tokens != line.tokens:
        yield f"{line.tokens} tokens, its request says {request.tokens}"


def _against_inputs(line: Line, sample: Sample | RejectedSample) -> Iterator[str]:
    if line.sample != sample.sample:
        yield f"sample {line.sample!r}, the inputs say {sample.sample!r}"
    if isinstance(sample, RejectedSample):
        if line.status != "rejected":
            yield f"{line.status}, though the inputs reject the sample: {sample.reason}"
        elif line.reason != sample.reason:
            yield f"rejected for {line.reason}, the inputs say {sample.reason}"
        return
    if line.status == "stored":
        if line.tokens != len(sample.ids):
            yield f"{line.tokens} tokens, the inputs have {len(sample.ids)}"
        try:
            proven = RequestId.parse(line.request).proves(encode_ids(sample.ids))
        except InvalidId:
            return
        if not proven:
            yield f"request {line.request} does not prove the inputs' token ids"

"""Prepares a run: its input files become the normalised samples in its destination, whole or not at all."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from headrace.errors import Conflict, UsageError
from headrace.formats import FormatNeeds
from headrace.manifest import INPUTS_FOLDER, SPEC_FILE
from headrace.runs import RunSpec
from headrace_dispatcher.checkpoint import Checkpoint, checkpoint_digest, read_checkpoint
from headrace_dispatcher.inputs import Inputs, RejectedSample
from headrace_dispatcher.inputs_writer import TEMPORARY_PREFIX, InputsWriter, remove_stale
from headrace_dispatcher.normalise import Normaliser
from headrace_dispatcher.render import MASK_VERSION
from headrace_dispatcher.runfile import RunFile
from headrace_dispatcher.samples import read_lines

Progress = Callable[[int, int], None]
# The root of a file system of its own, a volume's say, has this folder from the start.
_NOBODYS = frozenset({"lost+found"})
_DIGEST_SIZE = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """A run that can start: its spec, its inputs (the caller closes them), whether they were written by this call
    or found, and how many samples are rejected, by reason."""

    spec: RunSpec
    inputs: Inputs
    created: bool
    rejected: Counter[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Survey:
    """What a first pass over the data files finds: a digest per file, and how many lines are not blank."""

    digests: tuple[str, ...]
    lines: int


def prepare(
    run_file: RunFile,
    *,
    start: int = 0,
    end: int | None = None,
    limit: int | None = None,
    resolve_model: Callable[[str], Path | None],
    known_formats: Mapping[str, FormatNeeds],
    progress: Progress | None = None,
) -> Prepared:
    """Normalise the samples `start` up to, without, `end` of all data files in their order, at most `limit`.

    Inputs that are there already and of the same extraction are used as they are. `resolve_model` maps a known
    model's word to its folder, else to None; `known_formats` has for each format what it is made from; `progress` is
    called with samples done and in all. Memory is one sample, however many there are.

    Raises:
        UsageError: the data, the model, the format or the output folder cannot be used, no sample can, or a data
            file changed meanwhile.
        Conflict: the output folder belongs to another run, another extraction, or not to headrace.
        Unreadable: the inputs that are there are damaged or of a newer schema.
        Unavailable: they cannot be read now.
    """
    _check_selection(start, end, limit)
    run_file.check_format(known_formats)
    checkpoint = read_checkpoint(run_file.model_folder(resolve_model), run_file.chat_template)
    boundaries = run_file.resolve_boundaries(checkpoint.layers)
    _check_output(run_file.output)
    survey = _survey(run_file.data)
    chosen = _select(run_file, survey.lines, start, end, limit)
    spec = RunSpec(
        run=run_file.name,
        dataset=_dataset_digest(run_file, checkpoint, survey, chosen),
        total=len(chosen),
        model=str(checkpoint.folder),
        model_digest=checkpoint_digest(checkpoint.folder),
        engine_model=run_file.engine_model,
        boundaries=boundaries,
        final_state=run_file.final_state,
        hidden_size=checkpoint.hidden_size,
        format=run_file.format,
        output=str(run_file.output),
        max_attempts=run_file.max_attempts,
    )
    if (run_file.output / INPUTS_FOLDER).exists():
        return _reuse(spec)
    rejected = _write(spec, run_file, Normaliser(run_file, checkpoint), survey, chosen, progress)
    if rejected is None:
        return _reuse(spec)
    return Prepared(spec=spec, inputs=Inputs.open(run_file.output), created=True, rejected=rejected)


def _check_selection(start: int, end: int | None, limit: int | None) -> None:
    if start < 0 or (end is not None and end <= start) or (limit is not None and limit < 1):
        asked = f"start {start}, end {end}, limit {limit}"
        raise UsageError(f"{asked}: choose 0 <= start < end and a limit of at least 1")


def _check_output(output: Path) -> None:
    """Refuse a folder that holds what is not ours before any work is done; remove what a killed call left."""
    try:
        if not output.exists():
            return
        remove_stale(output)
        if (output / INPUTS_FOLDER).exists():
            return
        found = sorted(entry.name for entry in output.iterdir() if entry.name not in _NOBODYS)
    except OSError as error:
        raise UsageError(f"{output} cannot be used: {error.strerror}; choose another output") from error
    foreign = [name for name in found if not name.startswith(TEMPORARY_PREFIX)]
    if foreign:
        some = ", ".join(foreign[:5]) + (", ..." if len(foreign) > 5 else "")
        raise Conflict(f"{output} holds {some} and no inputs of a run; choose an empty folder as output")


def _survey(data: tuple[Path, ...]) -> _Survey:
    digests, lines = [], 0
    for path in data:
        digest = hashlib.blake2b(digest_size=_DIGEST_SIZE)
        lines += sum(1 for _ in read_lines(path, digest))
        digests.append(digest.hexdigest())
    return _Survey(digests=tuple(digests), lines=lines)


def _select(run_file: RunFile, lines: int, start: int, end: int | None, limit: int | None) -> range:
    names = ", ".join(map(str, run_file.data))
    if not lines:
        raise UsageError(f"{names}: no samples; each line must be one JSON object")
    chosen = range(lines)[start:end][:limit]
    if not chosen:
        raise UsageError(f"{names}: start {start} is beyond the last of {lines} samples")
    return chosen


def _dataset_digest(run_file: RunFile, checkpoint: Checkpoint, survey: _Survey, chosen: range) -> str:
    """Digest all that the normalised samples follow from, as hex; no name and no path is part of it."""
    parts = {
        "data": survey.digests,
        "selection": (chosen.start, chosen.stop),
        "tokenizer": _hash(checkpoint.tokenizer),
        "template": _hash(None if checkpoint.template is None else checkpoint.template.encode()),
        "special_tokens": dict(checkpoint.special_tokens),
        "vocab_size": checkpoint.vocab_size,
        "mask": (run_file.mask, MASK_VERSION),
        "max_length": run_file.max_length,
    }
    return _hash(json.dumps(parts, sort_keys=True).encode())


def _hash(data: bytes | None) -> str:
    return "" if data is None else hashlib.blake2b(data, digest_size=_DIGEST_SIZE).hexdigest()


def _reuse(spec: RunSpec) -> Prepared:
    output = Path(spec.output)
    if not (output / INPUTS_FOLDER / SPEC_FILE).exists():
        raise Conflict(f"{output / INPUTS_FOLDER} is not of headrace: it has no {SPEC_FILE}; choose another output")
    inputs = Inputs.open(output)
    try:
        if differences := spec.differences(inputs.spec):
            parts = "; ".join(differences)
            raise Conflict(f"{output} belongs to another extraction ({parts}); choose another output or its run file")
        # The folders may have moved, and the attempts are the caller's to change.
        inputs.spec = replace(inputs.spec, model=spec.model, output=spec.output, max_attempts=spec.max_attempts)
        return Prepared(spec=spec, inputs=inputs, created=False, rejected=inputs.rejected())
    except BaseException:
        inputs.close()
        raise


def _write(
    spec: RunSpec, run_file: RunFile, normaliser: Normaliser, survey: _Survey, chosen: range, progress: Progress | None
) -> Counter[str] | None:
    """Write the inputs; None when another process published its own meanwhile."""
    rejected: Counter[str] = Counter()
    first = ""
    position = 0
    with InputsWriter(run_file.output) as writer:
        for path, expected in zip(run_file.data, survey.digests, strict=True):
            digest = hashlib.blake2b(digest_size=_DIGEST_SIZE)
            for number, data in read_lines(path, digest):
                if position in chosen:
                    entry = normaliser.normalise(position - chosen.start, path, number, data)
                    if isinstance(entry, RejectedSample):
                        rejected[entry.reason] += 1
                        first = first or f"{path}:{number}: {entry.reason}: {entry.detail}"
                    writer.add(entry)
                    if progress is not None:
                        progress(position - chosen.start + 1, len(chosen))
                position += 1
            if digest.hexdigest() != expected:
                raise UsageError(f"{path} changed while it was read, nothing was written; call again when it rests")
        if rejected.total() == len(chosen):
            reasons = ", ".join(f"{reason} {count}" for reason, count in sorted(rejected.items()))
            raise UsageError(f"not one of {len(chosen)} samples can be used ({reasons}); the first: {first}")
        return rejected if writer.publish(spec) else None

"""Writes `headrace.json` once, and holds every later writer to it."""

from __future__ import annotations

from pathlib import Path, PurePosixPath

from headrace.errors import Conflict
from headrace.manifest import DATASET_FILE, Dataset, read_dataset
from headrace.runs import Identity, RunSpec
from headrace.verdicts import Refusal, changed_identity
from headrace_writer.destination import Destination, guard


def find_dataset(folder: Path, spec: RunSpec) -> Dataset | None:
    """Read `headrace.json` and compare its spec; None when there is none yet.

    Raises:
        Conflict: the folder holds another extraction.
        Unreadable: the file is damaged or of a newer schema.
    """
    with guard(folder):
        dataset = read_dataset(folder)
    if dataset is not None and dataset.spec.digest != spec.digest:
        differences = "; ".join(spec.differences(dataset.spec))
        raise Conflict(f"{folder} holds another extraction ({differences}); choose another output")
    return dataset


def ensure_dataset(destination: Destination, spec: RunSpec, identity: Identity) -> Dataset | Refusal:
    """Write `headrace.json` unless it is there; the first row's engine and weights are the dataset's for good.

    Returns:
        What the file says, or a refusal where it names another engine or other weights than `identity`.

    Raises:
        Conflict: the folder holds another extraction.
        Unreadable: the file is damaged or of a newer schema.
        DestinationFull, Unavailable: the folder cannot be used now.
    """
    dataset = find_dataset(destination.folder, spec)
    if dataset is None:
        mine = Dataset(spec=spec, identity=identity)
        destination.publish(PurePosixPath(DATASET_FILE), lambda file: file.write(mine.encode()))
        # Another writer may have been first.
        dataset = find_dataset(destination.folder, spec) or mine
    return changed_identity(identity, dataset.identity) or dataset

"""Looks at the model's final norm that a dataset keeps."""

from __future__ import annotations

from pathlib import Path

from headrace.dumpfolder import read_norm
from headrace.errors import Unreadable
from headrace.finalnorm import NORM_FILE, FinalNorm, declared_norm
from headrace.runs import Identity, RunSpec
from headrace_cli.verify.problems import Findings, Kind

_HINT = "the engine's own lies in its dump folder as final_norm.*.safetensors"


def find_norm(
    folder: Path, spec: RunSpec, identity: Identity | None, findings: Findings, *, needed: bool
) -> FinalNorm | None:
    """Read the norm of a dataset's folder and add to `findings` what is wrong with it; None unless it is sound.

    One that is not there is wrong only where it is `needed`: not every engine publishes one, and rows of most formats
    are made without.
    """
    try:
        norm = read_norm(folder / NORM_FILE)
    except FileNotFoundError:
        if needed:
            findings.add(Kind.DATASET, NORM_FILE, f"missing, though rows were made with it; {_HINT}")
        return None
    except Unreadable as error:
        findings.add(Kind.DATASET, NORM_FILE, f"{error}; {_HINT}")
        return None
    if norm.hidden_size != spec.hidden_size:
        detail = f"a weight of width {norm.hidden_size}, the run has {spec.hidden_size}"
        findings.add(Kind.DATASET, NORM_FILE, f"{detail}; {_HINT}")
        return None
    digest = declared_norm(identity.engine) if identity else norm.digest
    if norm.digest != digest:
        expected = "publishes none" if digest is None else f"publishes {digest}"
        findings.add(Kind.DATASET, NORM_FILE, f"{norm.digest}, the engine of the rows {expected}; {_HINT}")
        return None
    return norm

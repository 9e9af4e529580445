"""Fault plans in files, and what they did."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

Fault = Mapping[str, str | int | float | Sequence[int]]


def write_plan(path: Path, *faults: Fault, **settings: int | float) -> Path:
    """A plan of these faults, in order; `settings` are its `seed` and `starting_seconds`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [f"{key} = {json.dumps(value)}" for key, value in settings.items()]
    for fault in faults:
        lines += ["[[fault]]", *(f"{key} = {json.dumps(value)}" for key, value in fault.items())]
    path.write_text("\n".join(lines) + "\n")
    return path


def hits_of(plan: Path) -> list[dict[str, Any]]:
    """The hits that engines wrote down, oldest first."""
    log = plan.with_name(f"{plan.name}.jsonl")
    return [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []

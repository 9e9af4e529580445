"""Run files and data for tests of preparing a run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from headrace.errors import HeadraceError
from headrace.formats import FORMATS
from headrace_dispatcher.inputs import RejectedSample, Sample
from headrace_dispatcher.prepare import Prepared, prepare
from headrace_dispatcher.runfile import load_run_file
from tests.support.checkpoints import small_checkpoint


def ready(*ids: int, name: str | None = None) -> dict[str, Any]:
    table: dict[str, Any] = {"input_ids": list(ids), "loss_mask": [0] + [1] * (len(ids) - 1)}
    return table if name is None else {"id": name} | table


def chat(question: str, answer: str, name: str | None = None) -> dict[str, Any]:
    messages = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    return {"messages": messages} if name is None else {"id": name, "messages": messages}


def write_data(path: Path, *samples: Any) -> Path:
    path.write_text("".join(json.dumps(sample) + "\n" for sample in samples))
    return path


def run_file(folder: Path, extra: str = "", data: str = '"data.jsonl"', name: str = "demo") -> Path:
    if not (folder / "model").exists():
        small_checkpoint(folder / "model")
    path = folder / "run.toml"
    path.write_text(f'[run]\nname = "{name}"\ndata = {data}\noutput = "out"\nmodel = "model"\n{extra}')
    return path


def prepare_run(path: Path, **selection: Any) -> Prepared:
    return prepare(load_run_file(path), resolve_model=lambda word: None, known_formats=FORMATS, **selection)


def closed(path: Path, **selection: Any) -> tuple[Prepared, list[Sample | RejectedSample]]:
    prepared = prepare_run(path, **selection)
    with prepared.inputs as inputs:
        return prepared, [inputs[ordinal] for ordinal in range(len(inputs))]


def fails(kind: type[HeadraceError], path: Path, **selection: Any) -> str:
    """The error's message, after proving that the output holds nothing new."""
    output = path.parent / "out"
    before = files(output)
    with pytest.raises(kind) as caught:
        prepare_run(path, **selection)
    assert files(output) == before
    message = str(caught.value)
    assert "\n" not in message
    return message


def files(folder: Path) -> dict[str, int] | None:
    if not folder.is_dir():
        return None
    return {str(path.relative_to(folder)): path.stat().st_mtime_ns for path in folder.rglob("*")}

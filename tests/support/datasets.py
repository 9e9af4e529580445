"""Makes real datasets: inputs, rows and lines by the real writers, states by transformers from a tiny model."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import orjson
import torch
import xxhash
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from headrace.finalnorm import FinalNorm, with_norm
from headrace.ids import RequestId
from headrace.manifest import Line, decode_line
from headrace.masks import encode_mask
from headrace.messages import Record, StoreJob
from headrace.runs import RunSpec
from headrace_dispatcher.checkpoint import checkpoint_digest
from headrace_dispatcher.inputs import RejectedSample
from headrace_dispatcher.inputs import Sample as InputSample
from headrace_dispatcher.inputs_writer import InputsWriter
from headrace_writer import formats
from headrace_writer.store import Store, Stored
from tests.support import bus_values
from tests.support.dumps import BARE_ENGINE, MODEL, WEIGHTS, make_dump
from tests.support.stores import AT
from tests.support.watched import declare

RUN, LAYERS, BOUNDARIES, HIDDEN, VOCAB = "proof", 8, (2, 4, 5), 64, 400
LENGTHS = (5, 40, 40, 17, 64, 33, 40, 90)
REJECTED, FAILED = len(LENGTHS), len(LENGTHS) + 1
TOTAL = len(LENGTHS) + 2

Array = npt.NDArray[Any]
Alter = Callable[[int, Array, Array], tuple[Array, Array]]


@dataclass(frozen=True, slots=True, kw_only=True)
class States:
    """The states of every sample: `aux` [N, k, D] and `final` [N, D], float32, and its token ids."""

    token_ids: tuple[tuple[int, ...], ...]
    aux: tuple[Array, ...]
    pre_norm: tuple[Array, ...]
    post_norm: tuple[Array, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """What of a dataset is other than usual, to provoke a problem."""

    dtype: str = "F32"
    final_state: str = "pre_norm"
    alter: Alter | None = None
    masks: Mapping[int, Sequence[int]] = field(default_factory=dict)
    reject: frozenset[int] = frozenset()
    leave_out: frozenset[int] = frozenset()
    norm: FinalNorm | None = None  # what the engine publishes
    spec: Mapping[str, Any] = field(default_factory=dict)


def compute_states(model: Path, lengths: Sequence[int] = LENGTHS, boundaries: Sequence[int] = BOUNDARIES) -> States:
    """Random token ids, the same for the same lengths, and what transformers' `output_hidden_states` says of them."""
    network = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    pre_norm: list[Array] = []
    network.model.norm.register_forward_pre_hook(lambda _module, args: pre_norm.append(args[0][0].numpy().copy()))
    generator = np.random.default_rng(5)
    token_ids = tuple(tuple(generator.integers(3, VOCAB, count).tolist()) for count in lengths)
    aux, post_norm = [], []
    with torch.no_grad():
        for ids in token_ids:
            hidden = network(torch.tensor([ids]), output_hidden_states=True).hidden_states
            aux.append(np.stack([hidden[boundary][0].numpy() for boundary in boundaries], axis=1))
            post_norm.append(hidden[LAYERS][0].numpy())
    return States(token_ids=token_ids, aux=tuple(aux), pre_norm=tuple(pre_norm), post_norm=tuple(post_norm))


def build(folder: Path, model: Path, states: States, recipe: Recipe | None = None) -> Path:
    """Write a dataset of TOTAL samples into `folder`/dataset: rows, one rejected and one failed sample."""
    recipe = recipe or Recipe()
    output, dumps = folder / "dataset", folder / "dumps"
    spec = make_spec(output, model, recipe)
    _write_inputs(output, spec, states, recipe)
    dumps.mkdir()
    declare(dumps, recipe.norm)
    engine = with_norm(BARE_ENGINE, recipe.norm)
    store = Store(output, spec, "writer1")
    for ordinal, token_ids in enumerate(states.token_ids):
        if ordinal in recipe.leave_out:
            continue
        aux = states.aux[ordinal].reshape(len(token_ids), -1)
        final = (states.pre_norm if recipe.final_state == "pre_norm" else states.post_norm)[ordinal]
        if recipe.alter is not None:
            aux, final = recipe.alter(ordinal, aux.copy(), final.copy())
        request = request_of(ordinal, token_ids)
        dump = make_dump(
            dumps,
            request,
            token_ids,
            BOUNDARIES,
            HIDDEN,
            recipe.dtype,
            aux=as_stored(aux, recipe.dtype),
            final=as_stored(final, recipe.dtype),
            changes={"final_state": recipe.final_state, "engine": engine},
        )
        job = StoreJob(
            request=str(request),
            sample=f"sample-{ordinal}",
            job=1,
            mask=encode_mask(recipe.masks.get(ordinal, mask_of(token_ids))),
            engine=engine,
            weight_version=WEIGHTS,
        )
        assert isinstance(store.store(job, dump, AT), Stored)
    store.record(
        [
            Record(ordinal=ordinal, sample=f"sample-{ordinal}", status=status, reason=reason, request="", tokens=0)
            for ordinal, status, reason in (
                (len(states.token_ids), "rejected", "too_long"),
                (len(states.token_ids) + 1, "failed", "token_content"),
            )
        ],
        AT,
    )
    store.close()
    return output


def make_spec(output: Path, model: Path, recipe: Recipe) -> RunSpec:
    """The spec of such a dataset."""
    table: dict[str, Any] = {
        "run": RUN,
        "total": TOTAL,
        "model": str(model),
        "model_digest": checkpoint_digest(model),
        "engine_model": MODEL,
        "boundaries": BOUNDARIES,
        "final_state": recipe.final_state,
        "hidden_size": HIDDEN,
        "output": str(output),
    }
    return bus_values.make_spec(**{**table, **recipe.spec})


def _write_inputs(output: Path, spec: RunSpec, states: States, recipe: Recipe) -> None:
    samples = len(states.token_ids)
    with InputsWriter(output) as writer:
        for ordinal in range(spec.total):
            name = f"sample-{ordinal}"
            if ordinal == samples or ordinal in recipe.reject:
                writer.add(RejectedSample(ordinal=ordinal, sample=name, reason="too_long", detail="9 of 8 tokens"))
            else:
                ids = states.token_ids[ordinal] if ordinal < samples else (7, 8, 9)
                writer.add(InputSample(ordinal=ordinal, sample=name, ids=ids, mask=encode_mask(mask_of(ids))))
        assert writer.publish(spec)


def request_of(ordinal: int, token_ids: Sequence[int]) -> RequestId:
    """The id of the attempt that was stored."""
    return RequestId.make(RUN, ordinal, "nonce000", token_ids)


def mask_of(token_ids: Sequence[int]) -> list[int]:
    """The loss mask of a sample: the second half is trained."""
    half = len(token_ids) // 2
    return [0] * half + [1] * (len(token_ids) - half)


def as_stored(values: Array, dtype: str) -> Array:
    """Float32 states as a dump holds them; bfloat16 by rounding to nearest even, as bits."""
    if dtype == "BF16":
        return torch.from_numpy(values.copy()).bfloat16().view(torch.uint16).numpy()
    return values.astype({"F16": "<f2", "F32": "<f4"}[dtype])


def norm_of(model: Path, dtype: str = "F32") -> FinalNorm:
    """The final norm of a tiny model that is served in this dtype."""
    weight = load_file(model / "model.safetensors")["model.norm.weight"].float().numpy()
    return FinalNorm(dtype=dtype, hidden_size=HIDDEN, weight=as_stored(weight, dtype).tobytes(), eps=1e-5)


def row_path(folder: Path, ordinal: int, form: str = "headrace") -> Path:
    """A row's file."""
    return folder / formats.get(form).path(ordinal)


def segment(folder: Path) -> Path:
    """The manifest's one segment."""
    (path,) = (folder / "manifest").glob("*.jsonl")
    return path


def edit_lines(folder: Path, edit: Callable[[list[dict[str, Any]]], list[dict[str, Any]]]) -> None:
    """Rewrite the manifest's segment."""
    path = segment(folder)
    lines = [orjson.loads(line) for line in path.read_bytes().splitlines()]
    path.write_bytes(b"".join(orjson.dumps(line) + b"\n" for line in edit(lines)))


def edit_line(folder: Path, ordinal: int, **changes: Any) -> None:
    """Replace fields of one sample's line."""
    edit_lines(folder, lambda lines: [line | changes if line["ordinal"] == ordinal else line for line in lines])


def line_of(folder: Path, ordinal: int) -> Line:
    """One sample's line."""
    lines = [decode_line(line) for line in segment(folder).read_bytes().splitlines()]
    return next(line for line in lines if line.ordinal == ordinal)


def commit(folder: Path, ordinal: int, form: str = "headrace") -> None:
    """Let a sample's line say what its row's file now is."""
    data = row_path(folder, ordinal, form).read_bytes()
    edit_line(folder, ordinal, bytes=len(data), checksum="xxh3:" + xxhash.xxh3_64_hexdigest(data))


def fingerprint(folder: Path) -> dict[str, tuple[int, str]]:
    """Every file and folder with its time of change and its content, to see that nothing was written."""
    return {
        str(path): (path.lstat().st_mtime_ns, hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else "")
        for path in sorted(folder.rglob("*"))
    }

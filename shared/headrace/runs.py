"""A run: what is extracted from which samples, to where, in which form."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from typing import Any

from headrace.boundaries import check_ascending
from headrace.dumps import POST_NORM, PRE_NORM
from headrace.errors import Unreadable, UsageError
from headrace.formats import FORMATS
from headrace.records import build, check_schema

SCHEMA = 1
# Ordinals have nine digits in the names of rows.
MAX_TOTAL = 10**9

# What makes two runs the same extraction: a run resumes only where all of these are equal.
_IDENTITY = (
    "run",
    "dataset",
    "total",
    "model_digest",
    "engine_model",
    "boundaries",
    "final_state",
    "hidden_size",
    "format",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSpec:
    """One extraction, resolved: nothing here is a default or relative any more.

    `dataset` is the digest of input bytes, tokenizer, template, mask rule and selection; `total` counts its
    samples, rejected ones too. `model` is the checkpoint folder that rendered them, which may move; `model_digest` is
    of what lies in it; `engine_model` is the name that the engine gives its model. `boundaries` are ascending;
    `final_state` is `pre_norm` or `post_norm`; `hidden_size` is D. `output` is the dataset's absolute folder.
    """

    run: str
    dataset: str
    total: int
    model: str
    model_digest: str
    engine_model: str
    boundaries: tuple[int, ...]
    final_state: str
    hidden_size: int
    format: str
    output: str
    max_attempts: int
    schema: int = SCHEMA

    @property
    def digest(self) -> str:
        """16 hex digits over what makes the extraction; folders and attempts are not part of it: they may change."""
        table = asdict(self)
        identity = json.dumps([table[name] for name in _IDENTITY], separators=(",", ":"))
        return hashlib.blake2b(identity.encode(), digest_size=8).hexdigest()

    @property
    def stored_state(self) -> str:
        """The final state that its rows hold: its format's, or the captured one."""
        form = FORMATS.get(self.format)
        return (form.stores if form else "") or self.final_state

    @property
    def needs_norm(self) -> bool:
        """Whether its rows are made with the model's final norm."""
        return self.stored_state != self.final_state

    def differences(self, other: RunSpec) -> list[str]:
        """Name each part of the extraction that differs, as `name: mine, not theirs`."""
        mine, theirs = asdict(self), asdict(other)
        return [f"{name}: {mine[name]!r}, not {theirs[name]!r}" for name in _IDENTITY if mine[name] != theirs[name]]

    def encode(self) -> bytes:
        """Encode as one line of JSON."""
        return json.dumps(asdict(self), separators=(",", ":")).encode()

    @classmethod
    def decode(cls, data: bytes) -> RunSpec:
        """Decode; raises Unreadable for another form, values that no run has, or an unknown schema."""
        try:
            table: dict[str, Any] = json.loads(data)
            check_schema(table["schema"], SCHEMA)
            spec = build(cls, table)
            _check_ranges(spec)
            return spec
        except (Unreadable, UsageError) as error:
            raise Unreadable(f"run spec: {error}") from error
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            raise Unreadable(f"run spec: {type(error).__name__}: {error}") from error


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """The engine and weights that made a run's first row; every later row must come from the same."""

    engine: str
    weight_version: str


def _check_ranges(spec: RunSpec) -> None:
    check_ascending(spec.boundaries)
    if spec.final_state not in (PRE_NORM, POST_NORM):
        raise Unreadable(f"final_state is {spec.final_state[:40]!r}, not {PRE_NORM} or {POST_NORM}")
    if not 0 <= spec.total <= MAX_TOTAL:
        raise Unreadable(f"total is {spec.total}, not 0 to {MAX_TOTAL}")
    for name, value in (("hidden_size", spec.hidden_size), ("max_attempts", spec.max_attempts)):
        if value < 1:
            raise Unreadable(f"{name} is {value}, not at least 1")

"""Recomputes rows and compares each stored state with every boundary of the reference."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from headrace.dumps import PRE_NORM
from headrace_cli.verify.books import Books
from headrace_cli.verify.problems import Findings, Kind
from headrace_cli.verify.reference import POST_NORM, Reference
from headrace_cli.verify.report import Recomputed, Worst
from headrace_cli.verify.states import TOKEN_FACTOR, TOLERANCE, Deviation, judge
from headrace_writer.formats.base import States, as_float32

# Values of the last token's final state that are kept of each row: enough to tell rows apart.
_SKETCH = 64


@dataclass(slots=True, kw_only=True)
class _State:
    """One stored state [N, D] in float32, and its medians against the boundaries that have passed."""

    name: str
    expected: int
    stored: Tensor
    medians: dict[int, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Stranger:
    """A row whose states are not its own; `sketch` may tell whose they are."""

    path: str
    detail: str
    sketch: Tensor
    limit: float


class Recomputation:
    """Compares rows one by one. The forward keeps no states: each boundary is compared as it passes."""

    def __init__(self, model: Path, books: Books, tolerance: float | None, findings: Findings) -> None:
        """Load the reference; `tolerance` replaces those by dtype.

        Raises:
            UsageError: the checkpoint cannot be used.
        """
        self._reference = Reference(model, books.spec)
        self._books = books
        self._tolerance = tolerance
        self._findings = findings
        self._worst: dict[str, Worst] = {}
        self._rows = self._tokens = 0
        self._sketches: dict[int, Tensor] = {}
        self._strangers: dict[int, _Stranger] = {}

    def run(self, ordinals: Iterable[int], step: Callable[[], None]) -> None:
        """Recompute rows that are sound otherwise; `step` is called after each.

        Raises:
            UsageError: a token id is beyond the model's vocabulary.
        """
        for ordinal in ordinals:
            self._row(ordinal)
            step()

    def finish(self, seconds: float) -> Recomputed:
        """Name, now that all rows are known, the rows whose states lie under another's ids, and give the numbers."""
        for ordinal, stranger in self._strangers.items():
            owners = (other for other, own in self._sketches.items() if _off(stranger.sketch, own) <= stranger.limit)
            owner = next(owners, None)
            hint = "" if owner is None else f"; its last final state is that of ordinal {owner}"
            self._findings.add(Kind.STATES, stranger.path, stranger.detail + hint, ordinal)
        return Recomputed(rows=self._rows, tokens=self._tokens, seconds=seconds, worst=tuple(self._worst.values()))

    def _row(self, ordinal: int) -> None:
        spec, path = self._books.spec, self._books.form.path(ordinal)
        row = self._books.form.read(self._books.folder / path)
        tolerance = self._tolerance if self._tolerance is not None else TOLERANCE[row.final.info.dtype]
        aux = _tensor(row.aux).reshape(-1, len(spec.boundaries), spec.hidden_size)
        final = self._reference.layers if self._books.final_state == PRE_NORM else POST_NORM
        states = [
            _State(name=f"boundary {b}", expected=b, stored=aux[:, index]) for index, b in enumerate(spec.boundaries)
        ]
        states.append(_State(name="final", expected=final, stored=_tensor(row.final)))
        exact: dict[str, Deviation] = {}

        def visit(boundary: int, computed: Tensor) -> None:
            for state in states:
                state.medians[boundary] = float(_by_token(state.stored, computed).median())
                if boundary == state.expected:
                    exact[state.name] = _deviation(state, computed, tolerance * TOKEN_FACTOR)
            if boundary == final:
                self._sketches[ordinal] = computed[-1, :_SKETCH].clone()

        token_ids = np.frombuffer(row.token_ids, "<i8").tolist()
        self._reference.run(token_ids, visit)
        self._rows += 1
        self._tokens += len(token_ids)
        deviations = [exact[state.name] for state in states]
        for deviation in deviations:
            self._keep_worst(deviation, ordinal)
        self._judge(ordinal, str(path), deviations, tolerance, states[-1].stored[-1, :_SKETCH].clone())

    def _judge(self, ordinal: int, path: str, deviations: list[Deviation], tolerance: float, sketch: Tensor) -> None:
        by_kind: dict[Kind, list[str]] = {}
        for deviation in deviations:
            judged = judge(deviation, tolerance)
            if judged is not None:
                by_kind.setdefault(judged[0], []).append(judged[1])
        for kind, details in by_kind.items():
            detail = "; ".join(details)
            if kind is Kind.STATES and deviations[-1].median > tolerance:
                limit = tolerance * TOKEN_FACTOR
                self._strangers[ordinal] = _Stranger(path=path, detail=detail, sketch=sketch, limit=limit)
            else:
                self._findings.add(kind, path, detail, ordinal)

    def _keep_worst(self, deviation: Deviation, ordinal: int) -> None:
        known = self._worst.get(deviation.name)
        nearest = deviation.nearest[1] if known is None else min(known.nearest, deviation.nearest[1])
        if known is not None and known.median >= deviation.median:
            frobenius, median, at = known.frobenius, known.median, known.ordinal
        else:
            frobenius, median, at = deviation.frobenius, deviation.median, ordinal
        self._worst[deviation.name] = Worst(
            name=deviation.name,
            frobenius=max(frobenius, deviation.frobenius),
            median=median,
            token=max(deviation.worst, known.token if known else 0.0),
            nearest=nearest,
            ordinal=at,
        )


def _tensor(states: States) -> Tensor:
    return torch.from_numpy(as_float32(states.info, states.buffer))


def _by_token(stored: Tensor, computed: Tensor) -> Tensor:
    """|stored - computed| / |computed| by token [N]; a computed vector of zeros, as of a padding token, counts as 1."""
    length = torch.linalg.vector_norm(computed, dim=-1)
    off = torch.linalg.vector_norm(stored - computed, dim=-1)
    relative: Tensor = off / torch.where(length > 0, length, torch.ones_like(length))
    return relative


def _off(stored: Tensor, computed: Tensor) -> float:
    return float(_by_token(stored[None], computed[None])[0])


def _deviation(state: _State, computed: Tensor, token_tolerance: float) -> Deviation:
    off = _by_token(state.stored, computed)
    difference = torch.linalg.vector_norm(state.stored - computed)
    worst = int(off.argmax())
    several = len(off) > 1
    return Deviation(
        name=state.name,
        expected=state.expected,
        tokens=len(off),
        frobenius=float(difference / torch.linalg.vector_norm(computed).clamp_min(1e-30)),
        median=float(off.median()),
        worst=float(off[worst]),
        worst_token=worst,
        beyond=int((off > token_tolerance).sum()),
        # Filled as the other boundaries pass.
        medians=state.medians,
        before=float(_by_token(state.stored[1:], computed[:-1]).median()) if several else None,
        after=float(_by_token(state.stored[:-1], computed[1:]).median()) if several else None,
    )

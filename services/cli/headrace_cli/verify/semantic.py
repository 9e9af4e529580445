"""A proof without a reference run: a final state must predict its sample's next token, and no other sample's."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from statistics import median

import numpy as np
import torch
from torch import Tensor

from headrace_cli.verify.books import Books
from headrace_cli.verify.head import Head
from headrace_cli.verify.problems import Findings, Kind
from headrace_cli.verify.report import Ranks
from headrace_writer.formats.base import as_float32

# Measured with SmolLM2-135M on 60 conversations of 29 to 400 tokens: the next token ranks first in 0.44 of the
# places, in the worst row 0.23; a token of another row, where it differs, in 0.006.
# A rate below this says that the model cannot predict at all. An untrained one goes by the last token alone, so a
# frequent one makes few hits look like many: the token itself ranked first in 40 places of 3003, the right one in 5.
_TRAINED = 0.1
_CONTRAST = 3.0  # and it must be so many times that of other rows' tokens
_FLOOR = 0.5  # a right row's own rate, as a part of the median, is above this: measured 0.53
_UNLIKELY = 1e-4  # a row is wrong when so few hits would be rarer than this at the floor
# Several thousand comparisons are made in a dataset.
_SIGNIFICANT = 1e-6
_NEIGHBOURS = 32

_ITSELF = "the token itself: shifted by one to later places"
_NEXT_BUT_ONE = "the token after the next: shifted by one to earlier places"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Explanation:
    """Tokens other than the right ones that the ranks fit clearly better: `won` hits for them, `lost` for the right."""

    kind: Kind
    text: str
    won: int
    lost: int


@dataclass(slots=True, kw_only=True)
class _Row:
    """Counts of one row: places, hits of its own next tokens, and hits of other rows' tokens where they differ."""

    ordinal: int
    places: int
    hits: int
    control_hits: int = 0
    control_places: int = 0
    explanations: list[_Explanation] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Recent:
    row: _Row
    token_ids: Tensor
    first: Tensor


class NextTokens:
    """Counts row by row, each compared with the tokens of its neighbours in both directions; memory is theirs."""

    def __init__(self, head: Head, books: Books, findings: Findings) -> None:
        """Count with this head."""
        self._head = head
        self._books = books
        self._findings = findings
        self._rows: list[_Row] = []
        self._recent: deque[_Recent] = deque(maxlen=_NEIGHBOURS)

    def run(self, ordinals: Iterable[int], step: Callable[[], None]) -> None:
        """Count rows that are sound otherwise; `step` is called after each."""
        for ordinal in ordinals:
            row = self._books.form.read(self._books.folder / self._books.form.path(ordinal))
            token_ids = torch.from_numpy(np.frombuffer(row.token_ids, "<i8").copy())
            final = torch.from_numpy(as_float32(row.final.info, row.final.buffer))
            self._count(ordinal, token_ids, self._head.first(final))
            step()

    def finish(self, seconds: float) -> Ranks | None:
        """Judge every row, now that the usual rate is known; None where there was nothing to count."""
        rows = [row for row in self._rows if row.places]
        if not rows:
            return None
        rate = median(row.hits / row.places for row in rows)
        places = sum(row.control_places for row in rows)
        control = sum(row.control_hits for row in rows) / places if places else 0.0
        conclusive = bool(places) and rate >= _TRAINED and rate >= _CONTRAST * control
        for row in rows:
            problem = self._problem(row, rate, conclusive)
            if problem is not None:
                self._findings.add(*problem, row.ordinal)
        if not conclusive:
            self._findings.note(
                f"next tokens: inconclusive, they rank first in {rate:.3f} of the places and other rows' in "
                f"{control:.3f}; an untrained model or too few rows, else recompute the states"
            )
        return Ranks(
            rows=len(rows),
            tokens=sum(row.places + 1 for row in rows),
            seconds=seconds,
            rate=rate,
            lowest=min(row.hits / row.places for row in rows),
            control=control,
            conclusive=conclusive,
        )

    def _count(self, ordinal: int, token_ids: Tensor, first: Tensor) -> None:
        due = token_ids[1:]
        row = _Row(ordinal=ordinal, places=len(due), hits=int((first[:-1] == due).sum()))
        mine = _Recent(row=row, token_ids=token_ids, first=first)
        _explain(mine, Kind.SHIFTED, _ITSELF, token_ids[:-1])
        _explain(mine, Kind.SHIFTED, _NEXT_BUT_ONE, token_ids[2:])
        for other in self._recent:
            for one, two in ((mine, other), (other, mine)):
                text = f"the tokens of ordinal {two.row.ordinal}"
                won, compared = _explain(one, Kind.NEXT_TOKEN, text, two.token_ids[1:])
                one.row.control_hits += won
                one.row.control_places += compared
        self._rows.append(row)
        self._recent.append(mine)

    def _problem(self, row: _Row, usual: float, conclusive: bool) -> tuple[Kind, str, str] | None:
        path = str(self._books.form.path(row.ordinal))
        own = f"{row.hits} of {row.places} next tokens rank first"
        for better in row.explanations:
            # Without training a tied head ranks the token itself first: the residual stream begins with it.
            if better.text != _ITSELF or conclusive or not self._head.tied:
                return better.kind, path, f"{own}; {better.won} hits against {better.lost} for {better.text}"
        if conclusive and at_most(row.hits, row.places, _FLOOR * usual) < _UNLIKELY:
            return Kind.NEXT_TOKEN, path, f"{own}, in the other rows {usual:.2f} of them: states of another text"
        return None


def at_most(hits: int, places: int, rate: float) -> float:
    """The probability of `hits` or fewer in `places` independent tries at `rate` (binomial), rate in (0, 1).

    It keeps short rows from being judged by chance: against 0.22 at 1e-4, fewer than 38 places say nothing, and of
    100 it takes 7 hits or fewer.
    """
    logs = (
        math.lgamma(places + 1)
        - math.lgamma(count + 1)
        - math.lgamma(places - count + 1)
        + count * math.log(rate)
        + (places - count) * math.log1p(-rate)
        for count in range(hits + 1)
    )
    return min(1.0, math.fsum(math.exp(value) for value in logs))


def _explain(recent: _Recent, kind: Kind, text: str, tokens: Tensor) -> tuple[int, int]:
    """Compare other tokens with the right ones where they differ, and keep them if they fit clearly better (sign test)
    and as often as a trained model's own.

    Returns:
        Their hits, and the places that were compared.
    """
    due = recent.token_ids[1:]
    both = min(len(due), len(tokens))
    first, differs = recent.first[:both], due[:both] != tokens[:both]
    won = int(((first == tokens[:both]) & differs).sum())
    lost = int(((first == due[:both]) & differs).sum())
    compared = int(differs.sum())
    if won > lost and won >= _TRAINED * compared and at_most(lost, won + lost, 0.5) < _SIGNIFICANT:
        recent.row.explanations.append(_Explanation(kind=kind, text=text, won=won, lost=lost))
    return won, compared

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
# places, in the worst row 0.23; a token of another row in 0.01 to 0.04, at most 0.15.
_TRAINED = 0.1  # a median below this says that the model cannot predict at all
_CONTRAST = 3.0  # and it must be so many times that of other rows' tokens
_FLOOR = 0.5  # a right row's own rate, as a part of the median, is above this: measured 0.52
_UNLIKELY = 1e-4  # a row is wrong when so few hits would be rarer than this at the floor
# Several thousand comparisons are made in a dataset.
_SIGNIFICANT = 1e-6
_NEIGHBOURS = 32


@dataclass(slots=True, kw_only=True)
class _Row:
    """Counts of one row: places, hits of its own next tokens, and those that another explanation wins or loses.

    An explanation (another row's tokens, or the row's own shifted) is compared only where it names another token
    than the right one: `won` hits for it, `lost` hits for the right one.
    """

    ordinal: int
    places: int
    hits: int
    control_hits: int = 0
    control_places: int = 0
    explanations: dict[str, tuple[int, int]] = field(default_factory=dict)


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
        _explain(mine, "the token itself: shifted by one to later places", token_ids[:-1])
        _explain(mine, "the token after the next: shifted by one to earlier places", token_ids[2:])
        for other in self._recent:
            for one, two in ((mine, other), (other, mine)):
                won, compared = _explain(one, f"the tokens of ordinal {two.row.ordinal}", two.token_ids[1:])
                one.row.control_hits += won
                one.row.control_places += compared
        self._rows.append(row)
        self._recent.append(mine)

    def _problem(self, row: _Row, usual: float, conclusive: bool) -> tuple[Kind, str, str] | None:
        path = str(self._books.form.path(row.ordinal))
        own = f"{row.hits} of {row.places} next tokens rank first"
        for text, (won, lost) in row.explanations.items():
            # Without training a tied head ranks the token itself first: the residual stream begins with it.
            if text.startswith("the token itself") and self._head.tied and not conclusive:
                continue
            kind = Kind.NEXT_TOKEN if text.startswith("the tokens of") else Kind.SHIFTED
            return kind, path, f"{own}; {won} hits against {lost} for {text}"
        if conclusive and at_most(row.hits, row.places, _FLOOR * usual) < _UNLIKELY:
            return Kind.NEXT_TOKEN, path, f"{own}, in the other rows {usual:.2f} of them: states of another text"
        return None


def at_most(hits: int, places: int, rate: float) -> float:
    """The probability of `hits` or fewer in `places` independent tries at `rate` (binomial), rate in (0, 1).

    It keeps short rows from being judged by chance: at 0.22, no 12 places say anything at 1e-4, of 100 it takes 7
    or fewer hits.
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


def _explain(recent: _Recent, text: str, tokens: Tensor) -> tuple[int, int]:
    """Compare another explanation of the ranks with the right one, and keep it if it is clearly better (sign test)."""
    due = recent.token_ids[1:]
    both = min(len(due), len(tokens))
    first, differs = recent.first[:both], due[:both] != tokens[:both]
    won = int(((first == tokens[:both]) & differs).sum())
    lost = int(((first == due[:both]) & differs).sum())
    if won > lost and at_most(lost, won + lost, 0.5) < _SIGNIFICANT:
        recent.row.explanations[text] = (won, lost)
    return won, int(differs.sum())

"""What can be wrong with a dataset, and the place where findings are collected."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from enum import StrEnum

# A dataset that is wrong everywhere must not fill the memory: the counts go on, the details end here.
KEPT = 1000


class Kind(StrEnum):
    """The kinds of problems; the values are part of the JSON report."""

    # the books
    DATASET = "dataset"  # headrace.json or the final norm is missing, damaged, or of another extraction or model
    INPUTS = "inputs"  # inputs/ is missing or damaged
    DAMAGED_LINE = "damaged_line"
    WRONG_LINE = "wrong_line"  # a line disagrees with the run or with the inputs
    CONTRADICTION = "contradiction"  # lines of one sample that cannot all be true
    MISSING_ROW = "missing_row"  # a line without its row
    LOST_LINE = "lost_line"  # a row without its line
    FOREIGN_FILE = "foreign_file"
    # the rows
    SIZE = "size"
    CHECKSUM = "checksum"
    UNREADABLE = "unreadable"
    SWAPPED = "swapped"  # the row of another sample
    TOKEN_IDS = "token_ids"
    LOSS_MASK = "loss_mask"
    SHAPE = "shape"
    ORIGIN = "origin"  # the row's own metadata disagree with the run or with its line
    NOT_FINITE = "not_finite"
    ZERO_ROW = "zero_row"
    # the states
    STATES = "states"  # not what the model computes for these token ids
    BOUNDARY = "boundary"  # another boundary's states
    SHIFTED = "shifted"  # states of the token before or after
    NEXT_TOKEN = "next_token"  # the final state does not predict the sample's tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """One thing that is wrong.

    `where` is a path relative to the dataset's folder, or `manifest/{segment}:{line}`; `ordinal` is None where
    no sample is meant; `detail` is one line.
    """

    kind: Kind
    where: str
    detail: str
    ordinal: int | None = None


class Findings:
    """Collects problems, each counted and the first `KEPT` kept, and notes, which are no problems."""

    def __init__(self) -> None:
        """Start with none."""
        self.problems: list[Problem] = []
        self.counts: Counter[Kind] = Counter()
        self.notes: list[str] = []

    def add(self, kind: Kind, where: str, detail: str, ordinal: int | None = None) -> None:
        """Add a problem; its detail becomes one line."""
        self.counts[kind] += 1
        if len(self.problems) < KEPT:
            line = " ".join(detail.split())
            self.problems.append(Problem(kind=kind, where=where, detail=line, ordinal=ordinal))

    def note(self, text: str) -> None:
        """Add a note."""
        self.notes.append(text)

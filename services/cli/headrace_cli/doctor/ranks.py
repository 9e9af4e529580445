"""How the server's own next tokens rank by what was captured: numbers in, a finding out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from headrace.errors import VerificationFailed
from headrace_cli.doctor.findings import Finding, unchecked, well, wrong
from headrace_cli.verify.states import TOLERANCE

_WHAT = "lm_head(final) of each last token"


@dataclass(frozen=True, slots=True, kw_only=True)
class Last:
    """The end of one row: its `tokens`, the logits [V] from its last final state, and the server's own next token."""

    tokens: int
    logits: npt.NDArray[np.float32]
    next_token: int

    @property
    def best(self) -> int:
        """The token that ranks first; of equal ones the lowest."""
        return int(self.logits.argmax())

    def behind(self, token: int) -> float:
        """How far a token's logit is below the largest, as a part of the largest's distance from the mean."""
        largest = float(self.logits.max())
        spread = largest - float(self.logits.mean())
        return (largest - float(self.logits[token])) / spread if spread > 0 else 0.0


def judge(rows: Sequence[Last], dtype: str) -> Finding:
    """Judge all rows of a run; `dtype` is that of their states: BF16, F16 or F32.

    The server computed the prompt in another batch, and rounds logits to its dtype: a token counts as the first within
    the relative tolerance that `headrace verify` has for states of that dtype. The tokens of the other rows must be
    behind by more, or the check would let any states pass.
    """
    # Measured with SmolLM2-135M in bfloat16 and 120 prompts: the server's own token was first in 116, elsewhere behind
    # by 0.009 at most; another row's token was within 0.05 in 0.6 % of the pairs.
    tolerance = TOLERANCE[dtype]
    for row in rows:
        if row.next_token >= len(row.logits) or row.behind(row.next_token) > tolerance:
            return wrong(f"{_WHAT} is not what the server computes", _explain(row, rows), VerificationFailed)
    ties = sum(row.best != row.next_token for row in rows)
    different = len({row.next_token for row in rows})
    near = f" ({ties} of them within {tolerance:.2%} of the first, as rounding to {dtype} may leave it)" if ties else ""
    text = f"{_WHAT} gives the server's own next token in {len(rows)} of {len(rows)} rows{near}, {different} different"
    others = [row.behind(other.next_token) for row in rows for other in rows if other.next_token != row.next_token]
    if not others or sum(behind <= tolerance for behind in others) > len(others) // 2:
        how = "it tells nothing here, since other rows' tokens fit as well (an untrained model?); use headrace verify"
        return unchecked(text, how)
    return well(text)


def _explain(row: Last, rows: Sequence[Last]) -> str:
    if row.next_token >= len(row.logits):
        return f"the server says token {row.next_token}, beyond the head's {len(row.logits)}: give the served --model"
    rank = int((row.logits > row.logits[row.next_token]).sum()) + 1
    said = (
        f"after {row.tokens} tokens the server says {row.next_token}, which ranks {rank} of {len(row.logits)}; "
        f"{row.best} ranks first"
    )
    for other in rows:
        if other is not row and other.next_token == row.best:
            return f"{said}, as after the {other.tokens} tokens of another request: states of one under another's id"
    return f"{said}: the final state is of another place or kind, or the checkpoint is not the one that is served"


def final_kind(final_state: str, ratios: npt.NDArray[np.float32], *, tolerance: float = 0.05) -> tuple[bool, float]:
    """Whether final states can be of the kind that they are said to be, and the median of their ratios.

    `ratios` has, for each token of all rows, the root mean square of state / weight of the final norm: 1 for what that
    norm gave, whatever it was given; anything for what it was given.
    """
    middle = float(np.median(ratios))
    if final_state == "post_norm":
        return abs(middle - 1) <= tolerance, middle
    return bool((np.abs(ratios - 1) > tolerance).any()), middle

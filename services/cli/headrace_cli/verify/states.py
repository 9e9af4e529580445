"""How far stored states are from recomputed ones, and what that means: numbers in, a judgement out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from headrace_cli.verify.problems import Kind

# By dtype of the row, for the median over a row's tokens of |stored - recomputed| / |recomputed|. Measured with
# SmolLM2-135M (30 layers, prompts of 29 to 160 tokens, all boundaries) against one forward in float32: at most 1.1e-6
# for float32 in chunks of 37 tokens, 2.8e-3 for float16, 2.3e-2 for bfloat16; the nearest other boundary of the same
# row was never nearer than 0.19.
TOLERANCE = {"F32": 1e-4, "F16": 1e-2, "BF16": 5e-2}
# A single token may be further off than the median: measured 3.9e-6, 1.0e-2 and 1.4e-1. Two neighbouring tokens
# differ by 0.6 to 1.3.
TOKEN_FACTOR = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Deviation:
    """One stored state of one row against the recomputation.

    `name` is `boundary b` or `final`, `expected` the boundary it should be (b = L for the final norm's input, -1
    for its output). `frobenius` is |stored - recomputed| / |recomputed| over the row; `median` and `worst` are over
    its tokens, `worst_token` the place of the latter, `beyond` how many exceed the token tolerance. `medians` are
    those against every boundary; `before` and `after` those against the states of the previous and the next
    token, None for a row of one token.

    The median judges, not the Frobenius norm over the row, which one token can rule: norms reach 25,000 at a first
    token where the others have 150, and with it the next layer's input is only 0.7 % away.
    """

    name: str
    expected: int
    tokens: int
    frobenius: float
    median: float
    worst: float
    worst_token: int
    beyond: int
    medians: Mapping[int, float]
    before: float | None
    after: float | None

    @property
    def nearest(self) -> tuple[int, float]:
        """The other boundary that is nearest, and its median."""
        others = [boundary for boundary in self.medians if boundary != self.expected]
        boundary = min(others, key=lambda b: self.medians[b])
        return boundary, self.medians[boundary]


def judge(deviation: Deviation, tolerance: float) -> tuple[Kind, str] | None:
    """Say what is wrong with a stored state; None when it is what the model computes."""
    name, median = deviation.name, deviation.median
    boundary, nearest = deviation.nearest
    if nearest < median and nearest <= tolerance:
        return Kind.BOUNDARY, f"{name} matches {describe(boundary)} better ({nearest:.1e} against {median:.1e})"
    if median > tolerance:
        for shifted, neighbour in ((deviation.before, "before"), (deviation.after, "after")):
            if shifted is not None and shifted <= tolerance:
                return Kind.SHIFTED, f"{name} holds at each token the states of the one {neighbour} ({shifted:.1e})"
        return Kind.STATES, f"{name} is off by {median:.1e} (tolerance {tolerance:g})"
    if deviation.beyond:
        worst = f"most at token {deviation.worst_token} by {deviation.worst:.1e}"
        limit = f"tolerance {tolerance * TOKEN_FACTOR:g}"
        return (
            Kind.STATES,
            f"{name} is off at {deviation.beyond} of {deviation.tokens} tokens, {worst} ({limit})",
        )
    return None


def describe(boundary: int) -> str:
    """Name a boundary as the input of its layer; -1 is the final norm's output."""
    return "the final norm's output" if boundary < 0 else f"layer {boundary}'s input"

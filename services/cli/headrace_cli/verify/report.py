"""What a verification found: numbers, problems and notes, for people and as JSON."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from headrace.errors import RunIncomplete, VerificationFailed
from headrace_cli.console import human_bytes, one_line
from headrace_cli.verify.problems import Kind, Problem

SHOWN = 50


@dataclass(frozen=True, slots=True, kw_only=True)
class Worst:
    """The largest errors of one stored state over all recomputed rows, each relative.

    `frobenius` is over a row, `median` and `token` over a row's tokens; `nearest` is the smallest median against
    any other boundary of the same row; `ordinal` is the row of the largest median.
    """

    name: str
    frobenius: float
    median: float
    token: float
    nearest: float
    ordinal: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Recomputed:
    """How much was recomputed, in how many seconds without loading, and the worst errors by stored state."""

    rows: int
    tokens: int
    seconds: float
    worst: tuple[Worst, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranks:
    """How often the head ranks the next token first from the stored final state.

    `rate` is the median over rows and `lowest` the smallest of them; `control` is the rate of the tokens of other
    rows, where those differ. `conclusive` is False where the two are too close: an untrained model, or too few rows.
    """

    rows: int
    tokens: int
    seconds: float
    rate: float
    lowest: float
    control: float
    conclusive: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """The outcome. `total` = `stored` + `rejected` + `failed` + `open`.

    `problems` holds the first thousand, `counts` says how many there are of each kind; `notes` are no problems.
    `rows` and `bytes` were read in `seconds`. `recomputed` and `ranks` are None where that was not done, and a
    note says why.
    """

    folder: str
    run: str
    total: int
    stored: int
    rejected: int
    failed: int
    open: int
    rows: int
    bytes: int
    seconds: float
    model: str
    recomputed: Recomputed | None
    ranks: Ranks | None
    problems: tuple[Problem, ...]
    counts: Mapping[Kind, int]
    notes: tuple[str, ...]

    @property
    def ok(self) -> bool:
        """Whether nothing is wrong; open samples are not wrong, see `complete`."""
        return not self.counts

    @property
    def complete(self) -> bool:
        """Whether every sample has its line."""
        return self.open == 0

    def require_whole(self) -> None:
        """Raise unless all is well.

        Raises:
            VerificationFailed: something is wrong.
            RunIncomplete: nothing is wrong, and samples are open.
        """
        if not self.ok:
            raise VerificationFailed(f"{self.folder}: {sum(self.counts.values())} problems; see above")
        if not self.complete:
            raise RunIncomplete(f"{self.folder}: {self.open} samples are open; submit the run again")

    def to_json(self) -> dict[str, Any]:
        """The report as plain JSON values."""
        table = asdict(self)
        table["counts"] = {kind.value: count for kind, count in self.counts.items()}
        return table | {"ok": self.ok, "complete": self.complete}


def render(report: Report) -> RenderableType:
    """Render the report for a terminal."""
    parts: list[RenderableType] = [_summary(report)]
    if report.recomputed is not None and report.recomputed.worst:
        parts += [Text(), _worst(report.recomputed)]
    if report.problems:
        parts += [Text(), _problems(report)]
    parts += [Text(one_line(f"note: {note}"), style="dim") for note in report.notes]
    kinds = ", ".join(f"{kind.value} {count}" for kind, count in sorted(report.counts.items()))
    verdict = "[bold green]verified: nothing is wrong[/]" if report.ok else f"[bold red]wrong:[/] {kinds}"
    parts.append(Text.from_markup(verdict))
    return Group(*parts)


def _summary(report: Report) -> Table:
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    table.add_row("dataset", Text(one_line(f"{report.folder}  (run {report.run})")))
    table.add_row(
        "books",
        f"{report.total} samples = {report.stored} stored + {report.rejected} rejected + {report.failed} failed + "
        f"{report.open} open",
    )
    rate = f", {human_bytes(report.bytes / report.seconds)}/s" if report.seconds > 0 else ""
    table.add_row("rows", f"{report.rows} checked, {human_bytes(report.bytes)}{rate}")
    if (recomputed := report.recomputed) is not None:
        speed = f", {recomputed.tokens / recomputed.seconds:,.0f} tokens/s" if recomputed.seconds > 0 else ""
        table.add_row("recomputed", f"{recomputed.rows} rows, {recomputed.tokens:,} tokens{speed}")
        table.add_row("with", Text(one_line(report.model)))
    if (ranks := report.ranks) is not None:
        outcome = "" if ranks.conclusive else ", inconclusive"
        table.add_row(
            "next token",
            f"ranked first {ranks.rate:.3f} (lowest row {ranks.lowest:.3f}), tokens of other rows "
            f"{ranks.control:.3f}{outcome}; {ranks.rows} rows",
        )
    return table


def _worst(recomputed: Recomputed) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("worst relative error")
    for name in ("median token", "worst token", "row (Frobenius)", "nearest other", "at ordinal"):
        table.add_column(name, justify="right")
    for worst in recomputed.worst:
        numbers = (worst.median, worst.token, worst.frobenius, worst.nearest)
        table.add_row(worst.name, *(f"{number:.1e}" for number in numbers), str(worst.ordinal))
    return table


def _problems(report: Report) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold red")
    table.add_column("problem", no_wrap=True)
    table.add_column("ordinal", justify="right", no_wrap=True)
    table.add_column("where", overflow="fold")
    table.add_column("detail", overflow="fold")
    for problem in report.problems[:SHOWN]:
        ordinal = "" if problem.ordinal is None else str(problem.ordinal)
        table.add_row(problem.kind.value, ordinal, Text(one_line(problem.where)), Text(one_line(problem.detail)))
    hidden = sum(report.counts.values()) - min(SHOWN, len(report.problems))
    if hidden:
        table.add_row("...", "", "", f"{hidden} more; --json gives the first {len(report.problems)}")
    return table

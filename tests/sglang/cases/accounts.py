"""Accounts of a long run: what became of each request, by its answer, its folder and its forwards, and if that adds up.

Pure: who sends, reads and removes says here what it saw.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

# How a request was answered.
ANSWERED, DROPPED, ABORTED, REFUSED, GAVE_UP = "answered", "dropped", "aborted", "refused", "gave up"


@dataclass(slots=True, kw_only=True)
class Account:
    """What was seen of one request.

    `kind` says how it was sent, `right` whether its id names the tokens that were. `answers` is one entry an attempt;
    `dumps` what was wrong with each dump, empty for a right one; `notices` the reasons of its notices.
    """

    kind: str
    right: bool = True
    answers: list[str] = field(default_factory=list)
    dumps: list[str] = field(default_factory=list)
    notices: list[str] = field(default_factory=list)

    @property
    def fate(self) -> str:
        """One or two words for a table."""
        if self.dumps:
            return "published" if self.right else "proven wrong"
        return f"lost: {self.notices[0]}" if self.notices else "never run"

    def problems(self, rows: int) -> list[str]:
        """What does not add up, given how many of its prompt's rows were computed."""
        found = []
        if len(self.dumps) + len(self.notices) > 1:
            found.append(f"{len(self.dumps)} dumps and {len(self.notices)} notices")
        if self.right:
            found += [f"a wrong dump: {wrong}" for wrong in self.dumps if wrong]
        elif self.dumps and not self.dumps[0].startswith("token_content"):
            found.append(f"another prompt's dump, and no check finds it: {self.dumps[0] or 'a match'}")
        if not self.dumps and not self.notices:
            if ANSWERED in self.answers:
                found.append("answered, and neither published nor lost")
            if rows:
                found.append(f"{rows} rows were computed, and it is neither published nor lost")
        if DROPPED in self.answers and not self.notices:
            found.append("the answer says dropped, and there is no notice")
        return found


def problems(accounts: Mapping[str, Account], rows: Mapping[str, int]) -> list[str]:
    """What does not add up, one line each, by the rows that were computed of each request."""
    return [
        f"{rid} ({account.kind}, {'/'.join(account.answers)}): {problem}"
        for rid, account in accounts.items()
        for problem in account.problems(rows.get(rid, 0))
    ]


def table(accounts: Mapping[str, Account]) -> str:
    """Kinds by fates, as Markdown."""
    counts = Counter((account.kind, account.fate) for account in accounts.values())
    kinds, fates = sorted({kind for kind, _ in counts}), sorted({fate for _, fate in counts})
    lines = [["kind", *fates, "all"], ["---", *("--:" for _ in fates), "--:"]]
    for kind in kinds:
        row = [counts[kind, fate] for fate in fates]
        lines.append([kind, *(str(count) if count else "" for count in row), str(sum(row))])
    totals = [sum(counts[kind, fate] for kind in kinds) for fate in fates]
    lines.append(["all", *map(str, totals), str(sum(totals))])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)

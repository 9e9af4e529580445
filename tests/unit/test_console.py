"""What comes from others is shown as it is, and commands nothing."""

from __future__ import annotations

import pytest
from rich.table import Table
from rich.text import Text

from headrace_cli import console

DATA = "[/bold][red]x[/red] :x: \x1b[31m\x07\x9b2J\r\x7f\udcff"
SHOWN = "[/bold][red]x[/red] :x: [31m2J\ufffd"


def test_printable_keeps_text_tabs_and_lines() -> None:
    assert console.printable(DATA) == SHOWN
    assert console.printable("ä\t漢 🙂\n") == "ä\t漢 🙂\n"


@pytest.mark.parametrize("turn", ["\u202e", "\u202a", "\u2066", "\u2069", "\u200f", "\u061c", "\u2028", "\u2029"])
def test_what_turns_the_writing_or_ends_a_line_in_another_way_is_shown_to_be_there(turn: str) -> None:
    assert console.printable(f"a{turn}b") == "a\ufffdb"


def test_a_record_is_one_line_whatever_it_quotes() -> None:
    assert console.one_line("a\nrun b is finished\r\n\x85\x0b\x0c\x1ec") == "a\\nrun b is finished\\nc"
    assert len(console.one_line("".join(map(chr, range(0x3000)))).splitlines()) == 1


def test_a_long_reason_is_cut() -> None:
    assert console.quoted("x" * 500) == "x" * 500
    assert console.quoted("x" * 100_000) == "x" * 499 + "…"


@pytest.mark.parametrize("kind", ["text", "styled", "cell", "progress"])
def test_data_is_shown_as_it_is_wherever_it_stands(kind: str) -> None:
    with console.out.capture() as capture:
        if kind == "text":
            console.out.print(DATA)
        elif kind == "styled":
            console.out.print(Text(DATA, style="dim"))
        elif kind == "cell":
            table = Table(box=None)
            table.add_column(DATA, no_wrap=True)
            table.add_row(DATA)
            console.out.print(table)
        else:
            with console.progress_bar() as bar:
                bar.add_task(DATA, total=1)
    shown = capture.get()
    assert SHOWN in shown
    assert console.printable(shown) == shown

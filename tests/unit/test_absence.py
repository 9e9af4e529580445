"""How long what was there may be away."""

from __future__ import annotations

from headrace_cli.absence import Absence


def test_an_absence_is_too_long_only_after_its_patience() -> None:
    absence = Absence(15.0)
    assert [absence.too_long(now) for now in (100.0, 114.0, 115.0, 115.1)] == [False, False, False, True]


def test_each_absence_begins_anew() -> None:
    absence = Absence(15.0)
    assert not absence.too_long(0.0)
    absence.ended()
    assert not absence.too_long(100.0)
    assert absence.too_long(116.0)

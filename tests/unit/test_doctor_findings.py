from __future__ import annotations

import pytest

from headrace.errors import Conflict, HeadraceError, RedisAway, Unavailable, Unreadable, UsageError, VerificationFailed
from headrace_cli.doctor.findings import conclude, unchecked, well, wrong

URL = "http://e:1"


def test_yes_is_said_when_all_was_checked_and_well() -> None:
    assert conclude([well("a"), well("b")], URL).startswith("yes: http://e:1")


def test_what_could_not_be_told_is_no_yes_to_it() -> None:
    line = conclude([well("a"), unchecked("the head", "torch is not here")], URL)
    assert line.startswith("yes for http://e:1, but for what cannot be told from here: the head")


@pytest.mark.parametrize(
    ("errors", "worst"),
    [
        ([Unavailable], Unavailable),
        ([RedisAway, UsageError], UsageError),
        ([Unavailable, Conflict, UsageError], Conflict),
        ([Conflict, VerificationFailed, Unavailable], VerificationFailed),
        ([Unreadable, Unavailable], Unavailable),
    ],
)
def test_the_worst_of_what_is_wrong_is_the_end(errors: list[type[HeadraceError]], worst: type[HeadraceError]) -> None:
    findings = [well("a"), unchecked("b", "c"), *(wrong(f"{error.__name__} is", "mend it", error) for error in errors)]
    with pytest.raises(worst, match=f"no: {worst.__name__} is: mend it") as caught:
        conclude(findings, URL)
    assert type(caught.value) is worst
    assert ("more, see above" in str(caught.value)) is (len(errors) > 1)

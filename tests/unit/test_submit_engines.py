"""Which engines a submit accepts."""

from __future__ import annotations

import pytest

from headrace.errors import Conflict, Unavailable
from headrace_cli.submit import check_engines
from tests.support.bus_values import IDENTITY, make_site, make_spec


def test_an_engine_that_became_another_is_named_with_what_to_do() -> None:
    changed = make_site(weight_version="w2")
    check_engines([changed], make_spec(), None)
    with pytest.raises(Conflict) as caught:
        check_engines([changed], make_spec(), IDENTITY)
    assert all(word in str(caught.value) for word in (changed.url, "'w2'", "'w1'", "bring the engine back"))


def test_one_engine_that_can_is_enough() -> None:
    check_engines([make_site(model="other"), make_site("siteb")], make_spec(), IDENTITY)


def test_no_engine_is_unavailable() -> None:
    with pytest.raises(Unavailable, match="headrace doctor"):
        check_engines([], make_spec(), None)

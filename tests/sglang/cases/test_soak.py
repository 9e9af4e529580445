"""Random requests, disturbed in every way: no wrong dump, and each has its fate."""

from __future__ import annotations

import pytest

from tests.sglang.cases import accounts
from tests.sglang.cases.rig import MAIN, Rig
from tests.sglang.soak import Soak

pytestmark = pytest.mark.served(MAIN)


def test_three_hundred_random_requests(rig: Rig) -> None:
    soak = Soak(rig, 300, seed=7)
    soak.learn()
    found = soak.run()
    assert found == [], accounts.table(soak.accounts)
    fates = {account.fate for account in soak.accounts.values()}
    assert {"published", "lost: prefix_cached", "lost: incomplete"} <= fates
    assert soak.beside["retract"] > 3
    assert soak.beside["others"] > 5

"""A chaos run that cannot go on."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.chaos.driving import Driver
from bench.chaos.fleet import Fleet
from headrace.bus import Bus
from headrace.errors import Unavailable
from tests.support.bus_values import RUN

pytestmark = pytest.mark.redis


def test_a_process_that_ends_again_and_again_ends_the_run(bus: Bus, tmp_path: Path) -> None:
    with Fleet(tmp_path, tmp_path, ("--no-such-flag",), {}) as fleet:
        fleet.start("engine")
        driver = Driver(fleet, bus, RUN, 1, tmp_path / "dataset", [], lambda: None)
        with pytest.raises(Unavailable, match="engine ended by itself 3 times, at last with code 2"):
            driver.drive(120.0)
        assert len(driver.course.ended) == 3

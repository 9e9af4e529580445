"""Fixtures of the Redis tier."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from headrace.bus import Bus
from headrace.metrics import MATCH_FAILURES
from headrace.reasons import Reason
from headrace_watcher.folder import DumpFolder
from tests.support.desk import Desk
from tests.support.stores import RUN
from tests.support.watched import StubEngine


@pytest.fixture
def desk(bus: Bus, tmp_path: Path) -> Iterator[Desk]:
    with DumpFolder.open(tmp_path / "dumps") as folder:
        yield Desk(bus, folder, tmp_path)


@pytest.fixture
def failures() -> Callable[[Reason], float]:
    """How often a reason was counted since the test began."""
    begun = {reason: MATCH_FAILURES.labels(RUN, reason)._value.get() for reason in Reason}
    return lambda reason: MATCH_FAILURES.labels(RUN, reason)._value.get() - begun[reason]


@pytest.fixture
def dumps(tmp_path: Path) -> Path:
    folder = tmp_path / "dumps"
    folder.mkdir()
    return folder


@pytest.fixture
def engine(dumps: Path) -> Iterator[StubEngine]:
    with StubEngine(dumps) as stub:
        yield stub

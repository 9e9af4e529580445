"""Fixtures of the unit tier."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from headrace_capture.core import Capture
from tests.support.capture import start_capture


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A dump folder, not made yet."""
    return tmp_path / "dumps"


@pytest.fixture
def capture(folder: Path) -> Iterator[Capture]:
    """A capture core over that folder."""
    made = start_capture(folder)
    yield made
    made.close(10)

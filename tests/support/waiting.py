"""Waiting for a condition instead of for a while."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

_T = TypeVar("_T")


def wait_until(condition: Callable[[], _T | None], timeout: float = 20.0, what: str = "the condition") -> _T:
    """Poll until `condition()` is true and return its value; AssertionError after `timeout` seconds says `what`."""
    end = time.monotonic() + timeout
    pause = 0.002
    while True:
        value = condition()
        if value:
            return value
        if time.monotonic() > end:
            raise AssertionError(f"waited {timeout:g} s for {what}; last: {value!r}")
        time.sleep(pause)
        pause = min(0.1, pause * 1.5)

"""Makes the environments that are absent: `python -m tests.sglang.env`."""

from __future__ import annotations

from tests.sglang.env import NEWEST, OLDEST, environment

for version in (NEWEST, OLDEST):
    environment(version)

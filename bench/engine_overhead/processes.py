"""CPU time of a server's processes, from /proc."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

_TICK = os.sysconf("SC_CLK_TCK")
_SCHEDULER = b"sglang::scheduler"  # how SGLang titles the processes that hold the model


@dataclass(frozen=True, slots=True, kw_only=True)
class CpuSeconds:
    """User and system time since their start: of the schedulers' processes with all their threads, and of all."""

    schedulers: float
    all: float

    def __sub__(self, other: CpuSeconds) -> CpuSeconds:
        return CpuSeconds(schedulers=self.schedulers - other.schedulers, all=self.all - other.all)


def cpu_seconds(session: int) -> CpuSeconds:
    """CPU time of the processes that live in a session, which a server's first process leads."""
    schedulers = total = 0.0
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
            if int(fields[3]) != session:
                continue
            seconds = (int(fields[11]) + int(fields[12])) / _TICK
            title = (folder / "cmdline").read_bytes()
        except (FileNotFoundError, ProcessLookupError):  # it ended meanwhile
            continue
        total += seconds
        if title.startswith(_SCHEDULER):
            schedulers += seconds
    return CpuSeconds(schedulers=schedulers, all=total)

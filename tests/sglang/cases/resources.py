"""What a server's scheduler process holds, so that a test can see whether it grows."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

_NAME = "sglang::scheduler"


@dataclass(frozen=True, slots=True, kw_only=True)
class Resources:
    """Resident bytes, open descriptors and threads of one process."""

    resident: int
    descriptors: int
    threads: int


def scheduler_of(group: int) -> Path:
    """The /proc folder of the first scheduler process in a server's process group."""
    for place in sorted(Path("/proc").glob("[0-9]*"), key=lambda path: int(path.name)):
        try:
            named = _NAME in (place / "cmdline").read_text(errors="replace")
            fields = (place / "stat").read_text().rpartition(")")[2].split()
        except OSError:  # it ended meanwhile
            continue
        if named and int(fields[2]) == group:
            return place
    raise AssertionError(f"no {_NAME} in process group {group}")


def resources_of(group: int) -> Resources:
    """What the scheduler of a server's process group holds now."""
    place = scheduler_of(group)
    status = dict(line.split(":", 1) for line in (place / "status").read_text().splitlines() if ":" in line)
    return Resources(
        resident=1024 * int(status["VmRSS"].split()[0]),
        descriptors=len(list((place / "fd").iterdir())),
        threads=int(status["Threads"]),
    )

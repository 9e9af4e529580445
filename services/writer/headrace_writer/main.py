"""The console script `headrace-writer`."""

from __future__ import annotations

from headrace.extras import needs_extra


def run() -> None:
    """Run the writer until SIGTERM."""
    with needs_extra("writer"):
        from headrace import service
        from headrace_writer.worker import loop
    service.run(
        "writer",
        loop,
        "site",
        "redis",
        about="stores the captured dumps of HEADRACE_DUMP_DIR as rows of their datasets.",
    )

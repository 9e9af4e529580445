"""The console script `headrace-dispatcher`."""

from __future__ import annotations

from headrace.extras import needs_extra


def run() -> None:
    """Run the dispatcher until SIGTERM."""
    with needs_extra("dispatcher"):
        from headrace import service
        from headrace_dispatcher.daemon import loop
    service.run(
        "dispatcher",
        loop,
        "redis",
        about="sends the samples of all runs to the registered engines, within their credits, and retries what lapsed.",
    )

"""The console script `headrace-watcher`."""

from __future__ import annotations

from headrace.extras import needs_extra


def run() -> None:
    """Run the watcher until SIGTERM."""
    with needs_extra("watcher"):
        from headrace import service
        from headrace_watcher.watcher import loop
    service.run(
        "watcher",
        loop,
        "redis",
        "engine",
        "canary",
        about="judges each dump of HEADRACE_DUMP_DIR and registers the engine at HEADRACE_ENGINE_URL.",
    )

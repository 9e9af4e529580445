"""Logging: structlog, one JSON object a line on stderr, the standard library's records included."""

from __future__ import annotations

import logging
import sys
from typing import Literal

import structlog

_SHARED: list[structlog.typing.Processor] = [
    structlog.contextvars.merge_contextvars,
    structlog.stdlib.add_log_level,
    structlog.stdlib.add_logger_name,
    structlog.processors.TimeStamper(fmt="iso", utc=True),
]


def configure(service: str, level: str = "info", form: Literal["json", "console"] = "json") -> None:
    """Send every record of this process to stderr, with `service` bound; a request id is bound where one is at hand."""
    renderer: structlog.typing.Processor
    renderer = structlog.processors.JSONRenderer() if form == "json" else structlog.dev.ConsoleRenderer()
    structlog.configure(
        processors=[*_SHARED, structlog.stdlib.ProcessorFormatter.wrap_for_formatter],
        wrapper_class=structlog.make_filtering_bound_logger(getattr(logging, level.upper())),
        logger_factory=structlog.stdlib.LoggerFactory(),
        cache_logger_on_first_use=True,
    )
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=_SHARED,
            processors=[
                structlog.stdlib.ProcessorFormatter.remove_processors_meta,
                structlog.processors.format_exc_info,
                renderer,
            ],
        )
    )
    root = logging.getLogger()
    root.handlers = [handler]
    root.setLevel(level.upper())
    for chatty in ("urllib3", "watchfiles", "rq.worker", "uvicorn.access"):
        logging.getLogger(chatty).setLevel(logging.WARNING)
    structlog.contextvars.clear_contextvars()
    structlog.contextvars.bind_contextvars(service=service)


def get(name: str) -> structlog.stdlib.BoundLogger:
    """A logger; threads inherit nothing, so bind what a line needs."""
    return structlog.stdlib.get_logger(name)

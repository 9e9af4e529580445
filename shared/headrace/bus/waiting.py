"""Waiting for a Redis that is late, the same for every service that can do nothing without it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

from tenacity import (
    RetryCallState,
    Retrying,
    retry_if_exception_type,
    sleep_using_event,
    stop_when_event_set,
    wait_exponential,
)

from headrace import logs
from headrace.errors import RedisAway

if TYPE_CHECKING:
    from headrace.service import Service

log = logs.get(__name__)

_T = TypeVar("_T")
_FIRST_PAUSE, _LONGEST_PAUSE = 0.25, 5.0  # seconds


def until_redis_answers(service: Service, call: Callable[[], _T]) -> _T | None:
    """Repeat a call until Redis answers; None when the service is told to stop before.

    The part `redis` of the service's health says why it waits, and the log says it once.
    """

    def note(state: RetryCallState) -> None:
        error = state.outcome.exception() if state.outcome is not None else None
        service.health.set("redis", str(error))
        if state.attempt_number == 1:
            log.warning("waiting for Redis", error=str(error))

    retrying = Retrying(
        retry=retry_if_exception_type(RedisAway),
        wait=wait_exponential(multiplier=_FIRST_PAUSE, max=_LONGEST_PAUSE),
        stop=stop_when_event_set(service.stop),
        sleep=sleep_using_event(service.stop),
        before_sleep=note,
        retry_error_callback=lambda state: None,
    )
    answer = retrying(call)
    if answer is not None:
        service.health.set("redis")
    return answer

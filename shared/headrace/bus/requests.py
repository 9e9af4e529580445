"""Requests on the bus: claims, leases, captures, and their ends."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal, TypeVar

from headrace.bus.values import Attempt, AttemptKind, Burn, CaptureOutcome, Ended, Leases, Unrecorded
from headrace.ids import RequestId
from headrace.messages import StoreJob
from headrace.runs import Identity

if TYPE_CHECKING:
    from headrace.bus import Bus

_T = TypeVar("_T")
_REAP_MOST = 200


def _ms(seconds: float) -> int:
    return round(seconds * 1000)


def _mask(data: bytes) -> tuple[int, ...]:
    return tuple(int(length) for length in data.split())


class Requests:
    """What concerns single attempts. Every call may be repeated: it gives the earlier outcome again."""

    def __init__(self, bus: Bus, leases: Leases) -> None:
        """Work over this bus with these leases."""
        self._bus = bus
        self.leases = leases

    def claim(self, run: str, site: str, boot: str, attempts: Sequence[Attempt]) -> list[str]:
        """Open attempts at one site, within its caps, before they are posted.

        Returns for each `claimed`, `taken` (not pending any more, or a request id that was used before), `full`,
        `gone` (the site or its boot), or the run's state when it is not active.
        """
        arguments: list[str | int] = []
        for attempt in attempts:
            mask = " ".join(map(str, attempt.mask))
            arguments += (attempt.ordinal, attempt.request, attempt.tokens, attempt.dump_bytes, attempt.sample, mask)
        answers = self._bus.call("claim", run, site, boot, _ms(self.leases.in_flight), *arguments)
        return [answer.decode() for answer in answers]

    def renew(self, run: str, requests: Sequence[str]) -> list[str]:
        """Renew in-flight leases; returns the requests that hold none any more."""
        return self._lease(run, requests, self.leases.in_flight, answered=False)

    def answered(self, run: str, request: str) -> None:
        """The engine answered: the dump must come within the grace time."""
        self._lease(run, [request], self.leases.grace, answered=True)

    def end(
        self,
        request: RequestId,
        *,
        burn: Burn,
        kind: AttemptKind,
        reason: str,
        unless_captured: bool = False,
        counted: bool = False,
    ) -> str:
        """End an attempt that brought no row; one whose dump was captured burns in any case.

        With `unless_captured` that one goes on, and nothing counts: for who only knows what the engine answered. With
        `if_alone` it burns if no other request, of whichever dispatcher, was at its engine while it was. Of a sample's
        `counted` attempts that burn nothing each fifth burns all the same.
        Returns pending, failed, captured, stale or unknown. A mismatch counts also when the attempt had ended before.
        """
        burnt = burn if isinstance(burn, str) else int(burn)
        arguments = (request.run, str(request), request.ordinal, burnt, kind, reason)
        answer: bytes = self._bus.call("end_attempt", *arguments, int(unless_captured), int(counted))
        return answer.decode()

    def reject(self, run: str, ordinal: int, reason: str) -> bool:
        """Reject a pending sample for good; False when it is pending no more."""
        return bool(self._bus.call("reject", run, ordinal, reason) == b"rejected")

    def capture(self, request: RequestId, site: str, dump_bytes: int, identity: Identity) -> CaptureOutcome:
        """A dump of the request was proven: make it the sample's, if it is the first one."""
        answer = self._bus.call(
            "capture",
            request.run,
            str(request),
            request.ordinal,
            site,
            dump_bytes,
            identity.engine,
            identity.weight_version,
            _ms(self.leases.captured),
            _ms(self.leases.storing),
        )
        if len(answer) == 1:
            return CaptureOutcome(outcome=answer[0].decode())
        outcome, job, mask, sample = answer
        return CaptureOutcome(outcome=outcome.decode(), job=int(job), mask=_mask(mask), sample=sample.decode())

    def hold(self, site: str, dumps: Sequence[str], queued: Sequence[str]) -> list[str]:
        """Renew the captured leases of requests whose dump is there, and the storing leases of queued ones.

        Returns the requests of `dumps` that are captured no more.
        """
        leases = (_ms(self.leases.captured), _ms(self.leases.storing))
        return [lost.decode() for lost in self._bus.call("hold", site, *leases, len(dumps), *dumps, *queued)]

    def begin_store(self, request: RequestId, job: int, site: str) -> Literal["go", "done", "stale"]:
        """Open or renew the storing lease of job k; `stale` when the job is not the sample's current one."""
        lease = _ms(self.leases.storing)
        answer = self._bus.call("begin_store", request.run, str(request), request.ordinal, job, site, lease)
        return answer.decode()  # type: ignore[no-any-return]

    def stored(self, request: RequestId, site: str, nbytes: int) -> Literal["stored", "again", "unknown_run"]:
        """The row and its manifest line exist; accepted in any state, since the line is the commit."""
        arguments = (request.run, str(request), request.ordinal, site, request.tokens, nbytes)
        return self._bus.call("stored", *arguments).decode()  # type: ignore[no-any-return]

    def reap_run(self, run: str, before: float | None = None) -> tuple[list[Ended], list[Unrecorded]]:
        """End attempts whose lease lapsed `before` this second of Redis TIME; lease samples whose line must be written.

        None is now, 0 lets every attempt go on.
        """
        limit = "" if before is None else _ms(before)
        ended, records = self._bus.call("reap_run", run, _REAP_MOST, _ms(self.leases.record), limit)
        lapsed = [value.decode() for value in ended]
        waiting = [value.decode() for value in records]
        return (
            [Ended(request=r, outcome=o, reason=why) for r, o, why in _chunks(lapsed, 3)],
            [_unrecorded(*entry) for entry in _chunks(waiting, 4)],
        )

    def reap_site(self, site: str, before: float | None = None) -> tuple[list[str], list[StoreJob]]:
        """End captured samples whose dump nobody holds; return the storage jobs that must be queued again.

        Leases count as lapsed that ended `before` this second of Redis TIME; None is now.
        """
        limit = "" if before is None else _ms(before)
        ended, jobs = self._bus.call("reap_site", site, _REAP_MOST, _ms(self.leases.storing), limit)
        return [request.decode() for request in ended], [_store_job(*entry) for entry in _chunks(jobs, 6)]

    def _lease(self, run: str, requests: Sequence[str], seconds: float, *, answered: bool) -> list[str]:
        if not requests:
            return []
        return [lost.decode() for lost in self._bus.call("lease", run, _ms(seconds), int(answered), *requests)]


def _chunks(values: Sequence[_T], size: int) -> list[Sequence[_T]]:
    return [values[at : at + size] for at in range(0, len(values), size)]


def _unrecorded(ordinal: str, state: str, reason: str, request: str) -> Unrecorded:
    status: Literal["failed", "rejected"] = "failed" if state == "failed" else "rejected"
    return Unrecorded(ordinal=int(ordinal), status=status, reason=reason, request=request)


def _store_job(request: bytes, job: bytes, mask: bytes, sample: bytes, engine: bytes, weights: bytes) -> StoreJob:
    return StoreJob(
        request=request.decode(),
        sample=sample.decode(),
        job=int(job),
        mask=_mask(mask),
        engine=engine.decode(),
        weight_version=weights.decode(),
    )

"""One run in one tick: feed its window, and claim what fits each site that can serve it."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from headrace import logs
from headrace.bus import Bus
from headrace.bus.values import Attempt, RunView, Site
from headrace.flow import Room, feed_size, room
from headrace.ids import NONCE_ALPHABET, NONCE_LENGTH, RequestId
from headrace.settings import Settings
from headrace_dispatcher.flights import Flight
from headrace_dispatcher.inputs import Inputs, Sample
from headrace_dispatcher.plan import Fit, Limits, Nowhere, choose, dump_bytes

log = logs.get(__name__)

EXCEEDS_ENGINE = "exceeds_engine"

_FEED_BATCH = 200
_CLAIM_BATCH = 64
_PAGE = 256  # pending samples that are asked for at once


class Spreader:
    """Gives the samples of runs to sites; for one thread."""

    def __init__(
        self,
        bus: Bus,
        settings: Settings,
        admits: Callable[[Site], int | None],
        start: Callable[[Flight], None],
    ) -> None:
        """`admits` says how many requests a site may be sent now, `start` posts a request that was claimed."""
        self._bus = bus
        self._window = settings.window
        self._admits = admits
        self._start = start
        # A larger site may be restarting: what fits none is rejected when it had the time to come back.
        self._nowhere = Nowhere(2 * settings.site_ttl_seconds)

    def feed(self, view: RunView, inputs: Inputs) -> bool:
        """Make the run's next samples pending; False when there is nothing to feed, or another dispatcher did it."""
        size = feed_size(self._window, view.fed, _FEED_BATCH)
        stop = min(view.cursor + size, view.spec.total)
        if stop <= view.cursor:
            return False
        entries = [inputs[ordinal] for ordinal in range(view.cursor, stop)]
        reasons = ["" if isinstance(entry, Sample) else entry.reason for entry in entries]
        return self._bus.runs.feed(view.spec.run, view.cursor, reasons) is not None

    def spread(self, view: RunView, inputs: Inputs, fit: Sequence[Site]) -> None:
        """Claim and post what fits now at the sites that can serve the run, `fit`."""
        nowhere, looked = set[int](), not fit
        for site in fit:
            admitted = self._admits(site)
            if admitted == 0:
                continue
            free = room(site.caps, self._bus.sites.load(site))
            if free.requests == 0:
                continue
            if admitted is not None:
                free = replace(free, requests=min(free.requests, admitted))
            looked = True
            others = [_limits(other) for other in fit if other is not site]
            chosen, unfit = self._choose(view, inputs, site, free, others)
            nowhere |= unfit
            self._claim(view.spec.run, site, chosen)
        if looked:
            self._reject(view.spec.run, nowhere)

    def forget(self, run: str) -> None:
        """Drop the notes about a run that gets nothing for now."""
        self._nowhere.forget(run)

    def _choose(
        self, view: RunView, inputs: Inputs, site: Site, free: Room, others: Sequence[Limits]
    ) -> tuple[list[tuple[Attempt, Flight]], set[int]]:
        """What goes to the site now, and the ordinals that fit neither it nor the others."""
        here = _limits(site)
        samples: list[Sample] = []
        chosen: list[tuple[Attempt, Flight]] = []
        unfit: set[int] = set()
        lengths = self._lengths(view.spec.run, inputs, samples)
        for index, decision in enumerate(choose(lengths, free, here, others)):
            if decision is Fit.NOWHERE:
                unfit.add(samples[index].ordinal)
            elif decision is Fit.NOW:
                chosen.append(_attempt(site, here, view, samples[index]))
            if len(chosen) == _CLAIM_BATCH:
                break
        return chosen, unfit

    def _lengths(self, run: str, inputs: Inputs, samples: list[Sample]) -> Iterator[int]:
        """Tokens of the pending samples, in order and read as they are asked for; `samples` collects them."""
        skip = 0
        while ordinals := self._bus.runs.pending(run, _PAGE, skip):
            for ordinal in ordinals:
                entry = inputs[ordinal]
                if isinstance(entry, Sample):
                    samples.append(entry)
                    yield len(entry.ids)
            skip += len(ordinals)

    def _claim(self, run: str, site: Site, chosen: Sequence[tuple[Attempt, Flight]]) -> None:
        if not chosen:
            return
        answers = self._bus.requests.claim(run, site.site, site.boot, [attempt for attempt, _ in chosen])
        for answer, (_, flight) in zip(answers, chosen, strict=True):
            if answer == "claimed":
                self._start(flight)

    def _reject(self, run: str, nowhere: set[int]) -> None:
        for ordinal in self._nowhere.due(run, nowhere, time.monotonic()):
            self._bus.requests.reject(run, ordinal, EXCEEDS_ENGINE)
            log.warning("sample fits no engine", run=run, ordinal=ordinal)


def _limits(site: Site) -> Limits:
    return Limits(caps=site.caps, context_length=site.context_length, bytes_per_token=site.bytes_per_token)


def _attempt(site: Site, limits: Limits, view: RunView, sample: Sample) -> tuple[Attempt, Flight]:
    nonce = "".join(secrets.choice(NONCE_ALPHABET) for _ in range(NONCE_LENGTH))
    request = RequestId.make(view.spec.run, sample.ordinal, nonce, sample.ids)
    attempt = Attempt(
        ordinal=sample.ordinal,
        request=str(request),
        tokens=request.tokens,
        dump_bytes=dump_bytes(request.tokens, limits),
        sample=sample.sample,
        mask=sample.mask,
    )
    return attempt, Flight(request=request, site=site.site, boot=site.boot, url=site.url, token_ids=sample.ids)

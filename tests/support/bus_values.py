"""Runs, sites, attempts and lines for tests of the bus."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from headrace.bus import Bus, keys
from headrace.bus.values import Attempt, Leases, Site
from headrace.ids import RequestId
from headrace.manifest import Line
from headrace.runs import Identity, RunSpec

RUN, SITE, BOOT = "run1", "sitea", "boot1"
IDENTITY = Identity(engine="engine 1", weight_version="w1")
# Longer than any test takes on any machine: leases lapse when a test says so.
LONG = Leases(in_flight=3600, grace=1800, captured=3600, storing=3600, record=3600)


def make_spec(**changes: Any) -> RunSpec:
    """The spec of a run of 5 samples with 3 attempts each."""
    spec = RunSpec(
        run=RUN,
        dataset="d" * 16,
        total=5,
        model="/models/m",
        model_digest="cccccccccccccccc",
        engine_model="m",
        boundaries=(2, 4, 6),
        final_state="pre_norm",
        hidden_size=8,
        format="headrace",
        output="/data/out",
        max_attempts=3,
    )
    return replace(spec, **changes)


def make_site(name: str = SITE, **changes: Any) -> Site:
    """A site of 3 requests, 9 tokens and 1000 bytes."""
    site = Site(
        site=name,
        url="http://127.0.0.1:30000",
        boot=BOOT,
        incarnation="inc1",
        model="m",
        boundaries=(2, 4, 6),
        final_state="pre_norm",
        hidden_size=8,
        dtype="BF16",
        fingerprint=IDENTITY.engine,
        weight_version=IDENTITY.weight_version,
        final_norm=True,
        context_length=64,
        max_requests=3,
        max_tokens=9,
        dump_cap_bytes=1000,
        dump_bytes=0,
    )
    return replace(site, **changes)


def make_attempt(ordinal: int, nonce: str = "aaaaaaaa", *, tokens: int = 3, run: str = RUN) -> Attempt:
    """An attempt whose dump takes 100 bytes a token."""
    return Attempt(
        ordinal=ordinal,
        request=str(RequestId.make(run, ordinal, nonce, range(tokens))),
        tokens=tokens,
        dump_bytes=100 * tokens,
        sample=f"s{ordinal}",
        mask=(1, tokens - 1),
    )


def make_line(ordinal: int, status: Any = "stored", reason: str = "", request: str = "") -> Line:
    """A manifest line of 5 tokens and 7 bytes."""
    return Line(
        ordinal=ordinal,
        sample=f"s{ordinal}",
        status=status,
        reason=reason,
        request=request,
        tokens=5,
        path="",
        bytes=7,
        checksum="",
        boundaries=(2, 4, 6),
        proof="",
        at="2026-01-01T00:00:00Z",
    )


def start_run(bus: Bus, *, fed: int = 5, sites: Sequence[Site] = (), **changes: Any) -> RunSpec:
    """Create and activate a run, feed some of its samples, and register a site."""
    spec = make_spec(**changes)
    assert bus.runs.create(spec) == "created"
    for site in sites or [make_site()]:
        bus.sites.register(site, ttl=3600)
    assert bus.runs.activate(spec.run) == "active"
    if fed:
        assert bus.runs.feed(spec.run, 0, [""] * fed) == min(fed, spec.total)
    return spec


def claim(bus: Bus, *attempts: Attempt, site: str = SITE) -> list[RequestId]:
    """Claim attempts that must all be granted."""
    assert bus.requests.claim(RUN, site, BOOT, attempts) == ["claimed"] * len(attempts)
    return [RequestId.parse(attempt.request) for attempt in attempts]


def capture(bus: Bus, request: RequestId, site: str = SITE) -> int:
    """Capture a dump that must become the sample's; returns k."""
    outcome = bus.requests.capture(request, site, 100 * request.tokens, IDENTITY)
    assert outcome.outcome == "captured"
    return outcome.job


def lapse(bus: Bus, key: str, name: str) -> None:
    """A lease that is there ended long ago."""
    assert bus.redis.zadd(key, {name: 1}, xx=True, ch=True) == 1


def state_of(bus: Bus, ordinal: int) -> list[str]:
    """A sample as Redis keeps it; empty when it is not open."""
    value: Any = bus.redis.hget(keys.opened(RUN), str(ordinal))
    return value.decode().split("|") if value else []

"""`headrace doctor`: looks at every part that is reachable and says what to change."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import requests

from headrace.bus import Bus
from headrace.bus.client import redact
from headrace.bus.values import Site
from headrace.errors import HeadraceError, Unreadable
from headrace.settings import Settings

_TIMEOUT = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One check: what was looked at, and what to do when it is not well."""

    what: str
    ok: bool
    fix: str = ""


def examine(settings: Settings) -> list[Finding]:
    """Check Redis and the dispatchers, then each site: registration, engine, writers, folder."""
    try:
        bus = Bus.from_settings(settings)
    except HeadraceError as error:
        return [Finding(what=f"Redis at {redact(settings.redis_url)}", ok=False, fix=str(error))]
    try:
        findings = [*_redis(bus), _dispatchers(bus), *_sites(bus)]
        for site in bus.sites.registered():
            findings += _site(bus, site)
        return findings
    finally:
        bus.close()


def _redis(bus: Bus) -> list[Finding]:
    version, policy, persistent = bus.server_facts()
    return [
        Finding(
            what=f"Redis at {bus.where}: version {version}",
            ok=tuple(int(part) for part in version.split(".")[:2]) >= (6, 2),
            fix="headrace needs the commands of Redis 6.2: upgrade",
        ),
        Finding(
            what=f"Redis evicts: {policy}",
            ok=policy in ("noeviction", "unknown"),
            fix="set maxmemory-policy noeviction: evicted keys are lost samples",
        ),
        Finding(
            what=f"Redis persists: {'yes' if persistent else 'no'}",
            ok=persistent,
            fix="set appendonly yes, or a restart of Redis means a rebuild from the manifest",
        ),
    ]


def _dispatchers(bus: Bus) -> Finding:
    alive = bus.dispatchers.alive()
    fix = "start a headrace-dispatcher with this Redis: without one no sample is sent and no lapsed lease is ended"
    return Finding(what=f"dispatchers alive: {alive}", ok=alive > 0, fix=fix)


def _sites(bus: Bus) -> list[Finding]:
    names, registered = bus.sites.names(), bus.sites.registered()
    lapsed = sorted(set(names) - {site.site for site in registered})
    findings = [
        Finding(
            what=f"engines registered: {len(registered)}",
            ok=bool(registered),
            fix="start a watcher beside an engine; its log says why a canary did not match",
        )
    ]
    for name in lapsed:
        fix = "its watcher is gone or its engine is not well; what it captured is given to others soon"
        try:
            bus.sites.get(name)
            what = f"site {name} is not registered"
        except Unreadable as error:
            what, fix = f"site {name} takes no requests", str(error)
        findings.append(Finding(what=what, ok=False, fix=fix))
    return findings


def _site(bus: Bus, site: Site) -> list[Finding]:
    about = f"site {site.site} at {site.url}"
    facts = f"{site.model}, boundaries {list(site.boundaries)}, {site.final_state}, {site.fingerprint}"
    workers = bus.jobs.workers(site.site)
    failed = bus.jobs.failed(site.site)
    captured, queued = bus.sites.storing(site.site)
    used = site.dump_bytes / site.dump_cap_bytes
    return [
        Finding(what=f"{about}: {facts}", ok=True),
        _engine(site, about),
        Finding(
            what=f"{about}: writers {workers}, captured and not stored {captured}, jobs queued {queued}",
            ok=workers > 0,
            fix="start a headrace-writer with the same HEADRACE_DUMP_DIR",
        ),
        Finding(
            what=f"{about}: storage jobs that failed lately: {failed}",
            ok=failed == 0,
            fix="the writer's log says why; the jobs come again by themselves once that is mended",
        ),
        Finding(
            what=f"{about}: dump folder {used:.0%} of its cap",
            ok=used < 0.9,
            fix="the writers are slower than the engine: more writers, a faster destination, or a larger cap",
        ),
    ]


def _engine(site: Site, about: str) -> Finding:
    try:
        with requests.Session() as session:
            session.trust_env = False  # as the dispatcher asks it: no proxy in between
            status: Any = session.get(f"{site.url}/health", timeout=_TIMEOUT).status_code
    except requests.RequestException as error:
        status = type(error).__name__
    fix = "the engine does not answer from here; is its URL right for this machine?"
    return Finding(what=f"{about}: /health {status}", ok=status == 200, fix=fix)

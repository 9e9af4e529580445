"""Redis, the dispatchers, and what Redis says about sites: the part of the doctor that needs no engine's address."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from pathlib import Path

import requests

from headrace.bus import Bus
from headrace.bus.client import redact
from headrace.bus.values import Site
from headrace.capturestats import read_stats, stats_file
from headrace.dumpfolder import read_site
from headrace.errors import HeadraceError, Unavailable, Unreadable
from headrace.settings import Settings
from headrace_cli.console import human_bytes, quoted
from headrace_cli.doctor.findings import Finding, well, wrong

_TIMEOUT = 5.0
_NOT_FROM_HERE = "the engine does not answer from here; is its URL right for this machine?"
_NOBODY_WATCHES = "no watcher speaks for it any more: start it again; what it captured is given to others soon"
_FULL = 0.8  # of the memory that Redis may use: beyond it takes no writes, and everything stands


def examine(settings: Settings) -> Generator[Finding, None, None]:
    """Check Redis and the dispatchers, then each site: registration, engine, writers, folder."""
    try:
        bus = Bus.from_settings(settings)
    except HeadraceError as error:
        yield away(settings, error)
        return
    try:
        yield from redis(bus)
        yield dispatchers(bus)
        yield from _sites(bus)
        for site in bus.sites.registered():
            yield from look_at(bus, site, settings.dump_dir)
    except Unavailable as error:
        yield away(settings, error)
    finally:
        bus.close()


def away(settings: Settings, error: HeadraceError) -> Finding:
    """Redis, which cannot be used."""
    return wrong(f"Redis at {redact(settings.redis_url)}", str(error), type(error))


def redis(bus: Bus) -> Iterator[Finding]:
    """Version, eviction, memory and persistence of the store."""
    facts = bus.server_facts()
    yield Finding(
        what=f"Redis at {bus.where}: version {facts.version}",
        ok=tuple(int(part) for part in facts.version.split(".")[:2]) >= (6, 2),
        fix="headrace needs the commands of Redis 6.2: upgrade",
    )
    yield Finding(
        what=f"Redis evicts: {facts.policy}",
        ok=facts.policy in ("noeviction", "unknown"),
        fix="set maxmemory-policy noeviction: evicted keys are lost samples",
    )
    used, most = human_bytes(facts.used_bytes), human_bytes(facts.max_bytes)
    yield Finding(
        what=f"Redis uses {used} of {most if facts.max_bytes else 'no limit'}",
        ok=not facts.max_bytes or facts.used_bytes <= _FULL * facts.max_bytes,
        fix=f"over {_FULL:.0%}: raise maxmemory, or free what others keep there; a full Redis takes no writes, and "
        "every run stands",
    )
    yield Finding(
        what=f"Redis persists: {'yes' if facts.persistent else 'no'}",
        ok=facts.persistent,
        fix="set appendonly yes, or a restart of Redis means a rebuild from the manifest",
    )


def dispatchers(bus: Bus) -> Finding:
    """How many dispatchers live."""
    alive = bus.dispatchers.alive()
    fix = "start a headrace-dispatcher with this Redis: without one no sample is sent and no lapsed lease is ended"
    return Finding(what=f"dispatchers alive: {alive}", ok=alive > 0, fix=fix)


def _sites(bus: Bus) -> Iterator[Finding]:
    registered, explained = bus.sites.registered(), bus.sites.unregistered()
    see = "see below" if explained else "its log says why a canary did not match"
    yield Finding(
        what=f"engines registered: {len(registered)}",
        ok=bool(registered),
        fix=f"start a watcher beside an engine; {see}",
    )
    for entry in explained:
        yield wrong(f"the watcher of site {entry.site} does not register {entry.url}", entry.why)
    known = {site.site for site in registered} | {entry.site for entry in explained}
    for name in bus.sites.names():
        if name not in known:
            yield from _lapsed(bus, name)


def _lapsed(bus: Bus, name: str) -> Iterator[Finding]:
    try:
        site = bus.sites.get(name)
    except Unreadable as error:
        yield wrong(f"site {name} takes no requests", str(error))
    else:
        if site is None:  # or it has registered meanwhile
            yield wrong(f"site {name} is not registered", _NOBODY_WATCHES)


def look_at(bus: Bus, site: Site, dump_dir: Path) -> Iterator[Finding]:
    """A registered site: what it serves, its engine's health, its writers, its folder, and its capture's own account
    where its dump folder is the one here."""
    about = f"site {site.site} at {site.url}"
    facts = f"{site.model}, boundaries {list(site.boundaries)}, {site.final_state}, {site.fingerprint}"
    workers = bus.jobs.workers(site.site)
    failed = bus.jobs.failed(site.site)
    captured, queued = bus.sites.storing(site.site)
    used = site.dump_bytes / site.dump_cap_bytes
    yield well(f"{about}: {facts}")
    yield _engine(site, about)
    yield Finding(
        what=f"{about}: writers {workers}, captured and not stored {captured}, jobs queued {queued}",
        ok=workers > 0,
        fix="start a headrace-writer with the same HEADRACE_DUMP_DIR",
    )
    yield Finding(
        what=f"{about}: storage jobs that failed lately: {failed}",
        ok=failed == 0,
        fix="the writer's log says why; the jobs come again by themselves once that is mended",
    )
    yield Finding(
        what=f"{about}: dump folder {used:.0%} of its cap",
        ok=used < 0.9,
        fix="the writers are slower than the engine: more writers, a faster destination, or a larger cap",
    )
    yield from _capture(site, about, dump_dir)


def _capture(site: Site, about: str, dump_dir: Path) -> Iterator[Finding]:
    try:
        if read_site(dump_dir) != site.site:
            return
        stats = read_stats(dump_dir / stats_file(site.boot))
        if stats.boot != site.boot:
            return
    except (FileNotFoundError, Unreadable):  # none were written yet, or the folder is not here
        return
    lost = quoted(", ".join(f"{reason} {count}" for reason, count in sorted(stats.lost.items())) or "none")
    milliseconds = f"{stats.forward_ms_p50:.2f} ms, {stats.forward_ms_p99:.2f} ms at p99"
    yield well(
        f"{about}: capture published {stats.published} requests and lost {lost}; a forward takes {milliseconds} for it"
    )


def _engine(site: Site, about: str) -> Finding:
    try:
        with requests.Session() as session:
            session.trust_env = False  # as the dispatcher asks it: no proxy in between
            with session.get(f"{site.url}/health", timeout=_TIMEOUT, stream=True) as response:  # whatever it adds
                answer = response.status_code
    except requests.RequestException as error:
        return wrong(f"{about}: /health {type(error).__name__}", _NOT_FROM_HERE)
    return Finding(what=f"{about}: /health {answer}", ok=answer == 200, fix=_NOT_FROM_HERE)

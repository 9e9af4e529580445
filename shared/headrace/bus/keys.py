"""Every Redis key, spelt once for Python; `lua/common.lua` spells the same for the scripts."""

from __future__ import annotations

RUNS = "hr:runs"
SITES = "hr:sites"


def run(name: str) -> str:
    """Hash: spec, digest, cursor, counts, state and its reason."""
    return f"hr:run:{name}"


def pending(name: str) -> str:
    """List: ordinals that may be claimed, at most a window."""
    return f"hr:run:{name}:pending"


def opened(name: str) -> str:
    """Hash: ordinal -> the sample's state, for every sample that was fed and is not done."""
    return f"hr:run:{name}:open"


def in_flight(name: str) -> str:
    """Sorted set: request id -> end of the lease, ms."""
    return f"hr:run:{name}:inflight"


def recording(name: str) -> str:
    """Sorted set: ordinal of a failed or rejected sample -> end of its record job's lease, ms."""
    return f"hr:run:{name}:recording"


def done(name: str) -> str:
    """Bitmap: by ordinal, whether its manifest line exists."""
    return f"hr:run:{name}:done"


def failed(name: str) -> str:
    """Hash: ordinal -> reason, of each sample whose last end was a failure; one that is not done was reopened since."""
    return f"hr:run:{name}:failed"


def spared(name: str) -> str:
    """Hash: ordinal -> 5xx answers since one of them last cost an attempt, for samples that are not done."""
    return f"hr:run:{name}:spared"


def dead(name: str) -> str:
    """Stream, capped: request id, attempt, reason of each burnt attempt."""
    return f"hr:run:{name}:dead"


def request(name: str) -> str:
    """Hash: what was sent where."""
    return f"hr:req:{name}"


def site(name: str) -> str:
    """Hash with a TTL: the registration."""
    return f"hr:site:{name}"


def unregistered(name: str) -> str:
    """String with a TTL: why a site whose watcher lives is not registered."""
    return f"hr:site:{name}:unregistered"


def credits(name: str) -> str:
    """Hash: request id -> tokens, bytes, until (ms)."""
    return f"hr:site:{name}:credits"


def captured(name: str) -> str:
    """Sorted set: request id -> end of the captured lease, ms."""
    return f"hr:site:{name}:captured"


def storing(name: str) -> str:
    """Sorted set: request id -> end of the storing lease, ms."""
    return f"hr:site:{name}:storing"


def dispatcher(name: str) -> str:
    """String with a TTL: a dispatcher that lives."""
    return f"hr:dispatcher:{name}"


def store_queue(name: str) -> str:
    """Name of the RQ queue of a site."""
    return f"store-{name}"


# Why a key may live without a TTL; a test checks every key against this table.
WITHOUT_TTL = {
    "hr:runs": "index of runs; pruned when a run's hash expired",
    "hr:sites": "index of sites; pruned at eviction",
    "hr:run:*": "an unfinished run is kept until it ends; a finished one expires after 30 days",
    "hr:run:*:pending": "emptied by claims",
    "hr:run:*:open": "emptied as samples end",
    "hr:run:*:inflight": "leases; the reaper empties it",
    "hr:run:*:recording": "leases; emptied as lines are written",
    "hr:run:*:done": "as its run",
    "hr:run:*:failed": "as its run",
    "hr:run:*:spared": "emptied as samples end",
    "hr:run:*:dead": "capped, and as its run",
    "hr:site:*:credits": "records with an end; the reaper empties it",
    "hr:site:*:captured": "leases; the reaper empties it",
    "hr:site:*:storing": "leases; the reaper empties it",
    "rq:queues": "RQ's index of queues; pruned at eviction",
    "rq:workers": "RQ's index of workers; pruned as they end, and at eviction",
    "rq:queue:*": "a site's queue, and what RQ took from it and has not begun; deleted with its site",
    "rq:wip:*": "jobs that run; emptied as they end, deleted with its site",
    "rq:failed:*": "jobs that raised; emptied by RQ's maintenance, deleted with its site",
    "rq:job:*": "a queued or running job; deleted as it ends or with its site, and with a TTL if it raised",
}

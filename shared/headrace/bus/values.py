"""What the bus takes and returns: frozen values, so that no caller sees a Redis reply."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from headrace.flow import Caps
from headrace.runs import Identity, RunSpec
from headrace.tensorfile import ITEM_SIZE
from headrace.verdicts import changed_identity

RunState = Literal["rebuilding", "active", "paused", "cancelled", "finished"]
AttemptKind = Literal["mismatch", "loss", "error"]
Burn = bool | Literal["if_alone"]
DESTINATION_FULL = "destination full"
_AS_IT_WAS = "bring the engine back as it was, or start another run with a name and an output of its own"


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerFacts:
    """What the store says of itself: its version, its eviction policy (`unknown` where it may not be asked), whether it
    persists, and the bytes that it uses and may use, 0 where nothing limits them."""

    version: str
    policy: str
    persistent: bool
    used_bytes: int
    max_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Rate:
    """Rows and tokens that were stored per second of late, and the seconds left at that rate."""

    rows_per_second: float
    tokens_per_second: float
    seconds_left: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """The latest verdicts on samples' first attempts, after the run's first `since`: mismatches, and their reasons.

    Attempts of samples that were reopened are no first ones. A writer may refuse a dump long after its verdict was
    counted, so there may be more `mismatches` than `verdicts`.
    """

    since: int
    verdicts: int
    mismatches: int
    reasons: Mapping[str, int]

    @property
    def judged(self) -> int:
        """The attempts that the window is over: each mismatch is one of them."""
        return max(self.verdicts, self.mismatches)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunView:
    """A run as Redis has it now.

    `reasons` counts refused dumps and ended attempts by reason, `rejected_by` and `failed_by` count samples.
    `rate_rows` and `rate_tokens` are what was stored at the time `rate_since`, for a rate over the last half minute or
    so; times are seconds since the epoch. `reopened_at` is when failed samples of the finished run went again.
    `only_site` is the one site that may serve the run, empty where any does that fits; such a run is ended at the time
    `only_until`.
    """

    spec: RunSpec
    state: RunState
    reason: str
    cursor: int
    stored: int
    rejected: int
    failed: int
    tokens: int
    bytes: int
    verdicts: int
    mismatches: int
    reasons: Mapping[str, int]
    rejected_by: Mapping[str, int]
    failed_by: Mapping[str, int]
    identity: Identity | None
    pending: int
    in_flight: int
    fed: int
    waiting_for: str
    only_site: str
    only_until: float | None
    created_at: float
    reopened_at: float | None
    finished_at: float | None
    rate_since: float
    rate_rows: int
    rate_tokens: int
    window: Window

    @property
    def open(self) -> int:
        """Samples that have no manifest line yet."""
        return self.spec.total - self.stored - self.rejected - self.failed

    def rate(self, now: float) -> Rate | None:
        """How fast rows were stored of late, `now` in seconds of Redis TIME; None where none was, or the run rests."""
        seconds = now - self.rate_since if self.rate_since else 0.0
        rows = self.stored - self.rate_rows
        if seconds < 1 or rows <= 0 or self.state != "active":
            return None
        tokens = self.tokens - self.rate_tokens
        return Rate(
            rows_per_second=rows / seconds, tokens_per_second=tokens / seconds, seconds_left=self.open * seconds / rows
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """One request to be recorded before it is posted. `dump_bytes` is what its dump will take."""

    ordinal: int
    request: str
    tokens: int
    dump_bytes: int
    sample: str
    mask: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class CaptureOutcome:
    """What became of a proven dump.

    `captured`: its storage job is `job`. `duplicate`: another request of the sample was captured. `done`: the sample's
    line exists. `closed`: it failed or was rejected. `identity`: another engine or weights made the run's first row
    just now. `unknown_run`, `unknown_request`: Redis does not know it.
    """

    outcome: Literal["captured", "duplicate", "done", "closed", "identity", "unknown_run", "unknown_request"]
    job: int = 0
    mask: tuple[int, ...] = ()
    sample: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """A registration: one dump folder with its watcher, and the engine that fills it.

    `final_norm` says whether the engine publishes its final norm.
    """

    site: str
    url: str
    boot: str
    incarnation: str
    model: str
    boundaries: tuple[int, ...]
    final_state: str
    hidden_size: int
    dtype: str
    fingerprint: str
    weight_version: str
    final_norm: bool
    context_length: int
    max_requests: int
    max_tokens: int
    dump_cap_bytes: int
    dump_bytes: int

    @property
    def caps(self) -> Caps:
        """What the site takes at once."""
        return Caps(requests=self.max_requests, tokens=self.max_tokens, dump_bytes=self.dump_cap_bytes)

    @property
    def bytes_per_token(self) -> int:
        """Bytes of dump per token: k + 1 states of D and one int64 id."""
        return (len(self.boundaries) + 1) * self.hidden_size * ITEM_SIZE[self.dtype] + 8

    def unfit_for(self, spec: RunSpec, identity: Identity | None) -> str:
        """Why the site cannot serve a run whose rows are of this identity, if it has one; empty when it can."""
        pairs = (
            ("model", self.model, spec.engine_model),
            ("boundaries", list(self.boundaries), list(spec.boundaries)),
            ("final state", self.final_state, spec.final_state),
            ("hidden size", self.hidden_size, spec.hidden_size),
        )
        problems = [f"{name} {has!r}, the run needs {needs!r}" for name, has, needs in pairs if has != needs]
        if spec.needs_norm and not self.final_norm:
            problems.append(
                f"publishes no final norm, which format {spec.format!r} needs with {spec.final_state!r}; "
                f"capture {spec.stored_state!r} instead"
            )
        mine = Identity(engine=self.fingerprint, weight_version=self.weight_version)
        if not problems and (changed := changed_identity(mine, identity)) is not None:
            problems.append(f"{changed.detail}; {_AS_IT_WAS}")
        return "; ".join(problems)


@dataclass(frozen=True, slots=True, kw_only=True)
class Unregistered:
    """A site whose watcher lives and that takes no requests: the engine that the watcher asks, and what is missing."""

    site: str
    url: str
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """An attempt that the reaper ended: `outcome` is pending, failed, stale or unknown."""

    request: str
    outcome: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Unrecorded:
    """A failed or rejected sample whose line must be written; `request` is its last attempt, if any."""

    ordinal: int
    status: Literal["failed", "rejected"]
    reason: str
    request: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Leases:
    """How long a lease holds, in seconds, and for how long a dump may come after its HTTP answer."""

    in_flight: float = 30.0
    grace: float = 20.0
    captured: float = 45.0
    storing: float = 60.0
    record: float = 30.0

    @property
    def shortest(self) -> float:
        """The shortest lease whose end costs an attempt or a job."""
        return min(self.in_flight, self.grace, self.captured, self.storing)

    @property
    def longest(self) -> float:
        """The longest one: within it everybody who works has renewed, or is gone."""
        return max(self.in_flight, self.grace, self.captured, self.storing)

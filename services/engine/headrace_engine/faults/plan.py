"""A fault plan: a TOML file that says which requests go wrong, and how; choosing among its faults is pure."""

from __future__ import annotations

import hashlib
import tomllib
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from headrace.errors import UsageError
from headrace.hints import did_you_mean
from headrace.ids import CANARY, RequestId


class Kind(StrEnum):
    """How a request goes wrong: in the forwards that the capture gets, at its dump's publication, or in its answer."""

    # In the forwards. What is split here is split whatever the steps were.
    PREFIX_HIT = "prefix_hit"  # the first half is left out, as by a prefix cache
    LOST_PART = "lost_part"  # the middle third never comes
    REPEATED_PART = "repeated_part"  # a part comes again, as after a retraction; ends right
    DISORDERED_PARTS = "disordered_parts"  # the middle third comes before the first; ends right
    OTHER_STATES = "other_states"  # another request's, under the right ids; no verdict can see it
    OTHER_TOKENS = "other_tokens"  # one token id is another
    SWAPPED_BOUNDARIES = "swapped_boundaries"  # the first two, or a single one and the final state; no verdict sees it
    NAN = "nan"  # one value
    ZERO_ROW = "zero_row"  # one row of the first boundary
    WEIGHTS_MID_PROMPT = "weights_mid_prompt"  # the second half has another weight version
    OTHER_WEIGHTS = "other_weights"  # all of it has
    EVICTED = "evicted"  # the second half comes after the next request of ours was half prefilled
    NO_MEMORY = "no_memory"  # the capture finds none for the rows
    CAPTURE_FAULT = "capture_fault"  # the capture fails
    ESCAPING_ID = "escaping_id"  # the rows come under an id that leaves the dump folder
    WITHHELD = "withheld"  # no rows come
    HANG = "hang"  # the scheduler stands still before the last part
    CRASH = "crash"  # SIGKILL between the halves

    # At publication, to the file that is whole and has no name yet.
    TORN = "torn"  # cut in half
    FLIPPED = "flipped"  # one bit of the states
    LATE = "late"
    SHORT = "short"  # the last row is left out
    OTHER_BOUNDARIES = "other_boundaries"  # the header's are one higher
    OTHER_SHAPE = "other_shape"  # states of half the width
    OTHER_ENGINE = "other_engine"  # another fingerprint
    UNKNOWN_RUN = "unknown_run"  # the name is that of a run `ghost`

    # In the answer.
    DUPLICATE_RID = "duplicate_rid"  # 400; the request is computed and captured
    TOO_LONG = "too_long"  # 400; a stub of one row runs under its id
    ABORT = "abort"  # 200; aborted before it runs, or after the first part if it is longer than a step
    UNAVAILABLE = "unavailable"  # 503; never computed
    BAD_ANSWER = "bad_answer"  # 200 and a page of HTML; never computed
    SLOW = "slow"  # computed and captured, answered later
    CUT = "cut"  # computed and captured, half of the answer


TIMED = frozenset({Kind.HANG, Kind.LATE, Kind.SLOW})
# Tokens below which a fault cannot be told from another one, or from none.
SHORTEST: Mapping[Kind, int] = {
    Kind.PREFIX_HIT: 2,
    Kind.LOST_PART: 3,
    Kind.REPEATED_PART: 2,
    Kind.DISORDERED_PARTS: 3,
    Kind.WEIGHTS_MID_PROMPT: 2,
    Kind.EVICTED: 2,
    Kind.SHORT: 2,
    Kind.TOO_LONG: 2,
}
_SECONDS = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One entry of a plan, the `index`th.

    `rate` of the samples are hit, each in `times` attempts at most, `count` attempts in all. `run` None is every run
    but the canary, `ordinals` None every sample. `seconds` is for the kinds of `TIMED`.
    """

    index: int
    kind: Kind
    rate: float = 1.0
    run: str | None = None
    ordinals: frozenset[int] | None = None
    times: int = 1
    count: int | None = None
    seconds: float = _SECONDS

    def wants(self, request: RequestId, seed: int) -> bool:
        """Whether the fault is meant for the request's sample, which does not depend on what was hit before."""
        return (
            (not request.is_canary if self.run is None else request.run == self.run)
            and (self.ordinals is None or request.ordinal in self.ordinals)
            and request.tokens >= SHORTEST.get(self.kind, 1)
            and _fraction(f"{seed}/{self.index}/{request.run}/{request.ordinal}") < self.rate
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Tally:
    """How often each fault has hit: in all, and each sample of a run."""

    in_all: Counter[int] = field(default_factory=Counter)
    by_sample: Counter[tuple[int, str, int]] = field(default_factory=Counter)

    def add(self, index: int, request: RequestId) -> None:
        """Count a hit of the `index`th fault."""
        self.in_all[index] += 1
        self.by_sample[index, request.run, request.ordinal] += 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What goes wrong. The engine refuses requests for `starting_seconds` after its model is loaded, each boot."""

    seed: int = 0
    starting_seconds: float = 0.0
    faults: tuple[Fault, ...] = ()

    def choose(self, request: RequestId, tally: Tally) -> Fault | None:
        """The first fault that wants the request and is not used up; None if the request is to go well."""
        for fault in self.faults:
            used = tally.by_sample[fault.index, request.run, request.ordinal]
            left = fault.count is None or tally.in_all[fault.index] < fault.count
            if left and used < fault.times and fault.wants(request, self.seed):
                return fault
        return None


class _Table(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, allow_inf_nan=False)


class _FaultTable(_Table):
    """A `[[fault]]` table as written; each description completes the sentence "give ..."."""

    kind: Annotated[Kind, Field(strict=False)] = Field(description="a kind of fault")
    rate: float = Field(default=1.0, ge=0, le=1, description="the part of the samples, 0 to 1")
    run: str | None = Field(default=None, pattern="^[a-z0-9]{1,24}$", description=f"a run's name, or {CANARY}")
    ordinals: list[Annotated[int, Field(ge=0)]] | None = Field(
        default=None, min_length=1, description="a list of samples' ordinals"
    )
    times: int = Field(default=1, ge=1, description="a whole number of attempts, at least 1")
    count: int | None = Field(default=None, ge=1, description="a whole number of hits, at least 1")
    seconds: float | None = Field(default=None, gt=0, le=3600, description="seconds, above 0 and up to 3600")


class _PlanTable(_Table):
    """A plan as written."""

    seed: int = Field(default=0, description="a whole number")
    starting_seconds: float = Field(default=0.0, ge=0, le=3600, description="seconds, 0 to 3600")
    fault: list[_FaultTable] = Field(default=[], description="[[fault]] tables")


def load_plan(path: Path) -> Plan:
    """Read a plan.

    Raises:
        UsageError: it is missing, not TOML, or a key is unknown, missing or of a wrong value.
    """
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"fault plan {path}: {error.strerror}; name a file that can be read") from error
    except ValueError as error:  # TOMLDecodeError and UnicodeDecodeError
        raise UsageError(f"fault plan {path}: not TOML: {error}; mend the file") from error
    try:
        read = _PlanTable.model_validate(table)
    except ValidationError as error:
        raise UsageError(f"fault plan {path}: {_first(error)}") from error
    for index, entry in enumerate(read.fault):
        if entry.seconds is not None and entry.kind not in TIMED:
            timed = ", ".join(sorted(TIMED))
            raise UsageError(f"fault plan {path}: fault.{index}.seconds: {entry.kind} takes none; only {timed} do")
    return Plan(
        seed=read.seed,
        starting_seconds=read.starting_seconds,
        faults=tuple(_fault(index, entry) for index, entry in enumerate(read.fault)),
    )


def _fault(index: int, entry: _FaultTable) -> Fault:
    return Fault(
        index=index,
        kind=entry.kind,
        rate=entry.rate,
        run=entry.run,
        ordinals=None if entry.ordinals is None else frozenset(entry.ordinals),
        times=entry.times,
        count=entry.count,
        seconds=_SECONDS if entry.seconds is None else entry.seconds,
    )


def _first(error: ValidationError) -> str:
    """The first thing that is wrong, with the place of its key and what to do."""
    wrong = error.errors(include_url=False)[0]
    place = ".".join(str(part) for part in wrong["loc"])
    names = [part for part in wrong["loc"] if isinstance(part, str)]
    fields = _FaultTable.model_fields if names[0] == "fault" and len(names) > 1 else _PlanTable.model_fields
    key = names[-1]
    if wrong["type"] == "extra_forbidden":
        return f"{place} is an unknown key{did_you_mean(key, fields)}"
    if wrong["type"] == "missing":
        return f"{place} is missing: give {fields[key].description}"
    hint = ""
    if key == "kind":
        kinds = [kind.value for kind in Kind]
        hint = did_you_mean(str(wrong["input"]), kinds) or f": {', '.join(kinds)}"
    return f"{place} = {str(wrong['input'])[:80]!r}: give {fields[key].description}{hint}"


def _fraction(text: str) -> float:
    """A number from 0 up to 1 that only the text decides."""
    digest = hashlib.blake2b(text.encode(), digest_size=7).digest()
    return int.from_bytes(digest, "big") / 256**7

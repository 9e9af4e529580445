"""Each fault at publication, against the real capture core: what lies in the folder, and what is made of it."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
import xxhash

from headrace.dumpfolder import read_dump, read_lost
from headrace.dumps import CHECKSUM_PREFIX, PRE_NORM, Dump
from headrace.errors import Unreadable
from headrace.ids import RequestId
from headrace.reasons import Reason
from headrace.runs import Identity
from headrace.verdicts import Match, Requirement, judge
from headrace_capture.core import Capture
from headrace_engine.faults.files import GHOST, SpoilingFolder
from headrace_engine.faults.log import Hits
from tests.support.capture import (
    BOUNDARIES,
    HIDDEN,
    WEIGHTS,
    Prompt,
    assert_published,
    dump_path,
    forward_of,
    leftovers,
    prompt,
    start_capture,
)
from tests.support.faults import write_plan
from tests.support.waiting import wait_until

HIT = 1
FINGERPRINT = "engine 1.0 tiny bf16 tp1"


@pytest.fixture
def wanted() -> list[Prompt]:
    return [prompt(6), prompt(20, ordinal=HIT), prompt(3, ordinal=2)]


@pytest.fixture
def hits(request: pytest.FixtureRequest, tmp_path: Path, wanted: list[Prompt]) -> Hits:
    """The faults that the test names, for the second prompt."""
    made = Hits(write_plan(tmp_path / "plan.toml", {"ordinals": [HIT], **request.param}))
    for one in wanted:
        made.choose(one.rid, "boot")
    return made


@pytest.fixture
def spoiling(hits: Hits, folder: Path) -> Iterator[Capture]:
    made = start_capture(folder, open_folder=partial(SpoilingFolder, hits=hits))
    yield made
    made.close(10)


def capture_all(spoiling: Capture, wanted: list[Prompt]) -> None:
    assert spoiling.forward(forward_of([(one, 0, one.tokens) for one in wanted])) == {}
    assert spoiling.flush(10)


def checksum_holds(path: Path, dump: Dump) -> bool:
    return dump.header.checksum == CHECKSUM_PREFIX + xxhash.xxh3_64_hexdigest(path.read_bytes()[dump.data_offset :])


def assert_others_are_well(folder: Path, wanted: list[Prompt]) -> None:
    for one in (wanted[0], wanted[2]):
        assert_published(folder, one)


@pytest.mark.parametrize(
    ("hits", "reason"),
    [
        ({"kind": "short"}, Reason.TOKEN_COUNT),
        ({"kind": "other_boundaries"}, Reason.LAYERS),
        ({"kind": "other_shape"}, Reason.SHAPE),
        ({"kind": "other_engine"}, Reason.ENGINE_CHANGED),
    ],
    indirect=["hits"],
)
def test_a_spoilt_dump_is_whole_and_refused_for_one_reason(
    spoiling: Capture, folder: Path, wanted: list[Prompt], reason: Reason
) -> None:
    capture_all(spoiling, wanted)
    path = dump_path(folder, wanted[HIT])
    dump = read_dump(path)
    assert checksum_holds(path, dump)
    assert path.stat().st_mode & 0o7777 == 0o640
    identity = Identity(engine=FINGERPRINT, weight_version=WEIGHTS)
    required = Requirement(boundaries=BOUNDARIES, final_state=PRE_NORM, hidden_size=HIDDEN, identity=identity)
    verdict = judge(dump, wanted[HIT].request, required)
    assert not isinstance(verdict, Match)
    assert verdict.reason == reason
    assert_others_are_well(folder, wanted)
    assert leftovers(folder) == []


@pytest.mark.parametrize("hits", [{"kind": "torn"}], indirect=True)
def test_a_torn_dump_cannot_be_read(spoiling: Capture, folder: Path, wanted: list[Prompt]) -> None:
    capture_all(spoiling, wanted)
    with pytest.raises(Unreadable):
        read_dump(dump_path(folder, wanted[HIT]))
    assert_others_are_well(folder, wanted)


@pytest.mark.parametrize("hits", [{"kind": "flipped"}], indirect=True)
def test_a_flipped_bit_is_seen_by_the_checksum_alone(spoiling: Capture, folder: Path, wanted: list[Prompt]) -> None:
    capture_all(spoiling, wanted)
    path = dump_path(folder, wanted[HIT])
    dump = read_dump(path)
    required = Requirement(boundaries=BOUNDARIES, final_state=PRE_NORM, hidden_size=HIDDEN, identity=None)
    assert isinstance(judge(dump, wanted[HIT].request, required), Match)
    assert not checksum_holds(path, dump)
    assert_others_are_well(folder, wanted)


@pytest.mark.parametrize("hits", [{"kind": "unknown_run"}], indirect=True)
def test_a_dump_of_a_run_that_nobody_submitted_says_so_in_its_name_and_header(
    spoiling: Capture, folder: Path, wanted: list[Prompt]
) -> None:
    capture_all(spoiling, wanted)
    assert not dump_path(folder, wanted[HIT]).exists()
    (ghost,) = folder.glob(f"hr-{GHOST}-*")
    dump = read_dump(ghost)
    assert dump.header.request == ghost.stem
    assert RequestId.parse(ghost.stem).proves(dump.token_ids)
    assert_others_are_well(folder, wanted)


@pytest.mark.parametrize("hits", [{"kind": "late", "seconds": 0.3}], indirect=True)
def test_a_late_dump_comes_after_the_others(spoiling: Capture, folder: Path, wanted: list[Prompt]) -> None:
    capture_all(spoiling, wanted)
    assert_others_are_well(folder, wanted)
    wait_until(dump_path(folder, wanted[HIT]).exists, what="the late dump")
    assert_published(folder, wanted[HIT])
    wait_until(lambda: leftovers(folder) == [], what="the hidden file to go")
    # Linked later, by the file system's clock, which is some milliseconds coarse.
    first, late = (dump_path(folder, wanted[which]).stat().st_ctime for which in (0, HIT))
    assert late - first > 0.25


@pytest.mark.parametrize("hits", [{"kind": "late", "seconds": 3600}], indirect=True)
def test_what_is_late_when_the_engine_ends_is_published(spoiling: Capture, folder: Path, wanted: list[Prompt]) -> None:
    capture_all(spoiling, wanted)
    assert not dump_path(folder, wanted[HIT]).exists()
    spoiling.close(10)
    assert_published(folder, wanted[HIT])
    assert leftovers(folder) == []


@pytest.mark.parametrize("hits", [{"kind": "torn"}], indirect=True)
def test_a_notice_is_never_spoilt(spoiling: Capture, folder: Path, wanted: list[Prompt]) -> None:
    hit = wanted[HIT]
    spoiling.forward(forward_of([(hit, 0, 5)]))
    spoiling.abort(hit.rid)
    assert spoiling.flush(10)
    assert read_lost(folder / f"{hit.rid}.lost.json").reason == Reason.ABORTED

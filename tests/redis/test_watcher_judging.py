from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from headrace.dumps import LOST_SUFFIX
from headrace.ids import RequestId
from headrace.messages import StoreJob
from headrace.metrics import DUPLICATES, LOSSES_TOTAL, MATCH_FAILURES, VERDICTS
from headrace.verdicts import LOST_REASONS, Reason
from tests.support.desk import GRACE, RETRY, SAMPLE, Desk, stats
from tests.support.dumps import ENGINE, WEIGHTS, make_dump
from tests.support.stores import BOUNDARIES, HIDDEN, RUN, make_sample, make_spec
from tests.support.watched import claim, lose, publish

pytestmark = pytest.mark.redis


def test_a_match_is_captured_and_queued_once(desk: Desk) -> None:
    claim(desk.bus, desk.site, [SAMPLE])
    path = desk.dump()
    verdicts = VERDICTS.labels(RUN)._value.get()
    desk.look()
    desk.look(5)
    expected = StoreJob(
        request=str(SAMPLE.request()),
        sample=SAMPLE.name,
        job=1,
        mask=SAMPLE.mask,
        engine=ENGINE,
        weight_version=WEIGHTS,
    )
    assert desk.jobs() == [expected]
    assert path.exists()
    assert VERDICTS.labels(RUN)._value.get() == verdicts + 1
    view = desk.bus.runs.get(RUN)
    assert view is not None
    assert (view.verdicts, view.mismatches, view.in_flight) == (1, 0, 0)


def test_a_match_whose_attempt_lapsed_wins_all_the_same(desk: Desk) -> None:
    claim(desk.bus, desk.site, [SAMPLE])
    assert desk.bus.requests.end(SAMPLE.request(), burn=True, kind="error", reason="lapsed") == "pending"
    desk.dump()
    desk.look()
    assert [job.request for job in desk.jobs()] == [str(SAMPLE.request())]


REFUSALS: list[tuple[str, dict[str, Any], Reason]] = [
    ("other ids", {}, Reason.TOKEN_CONTENT),
    ("named for another", {"request": str(SAMPLE.request(1))}, Reason.TOKEN_CONTENT),
    ("tokens", {"tokens": 11}, Reason.TOKEN_COUNT),
    ("boundaries", {"boundaries": (1, 4, 6)}, Reason.LAYERS),
    ("post norm", {"final_state": "post_norm"}, Reason.LAYERS),
    ("nan", {"stats": stats(not_finite=3)}, Reason.NOT_FINITE),
    ("infinite norm", {"stats": stats(norm_max=float("inf"))}, Reason.NOT_FINITE),
    ("zero row", {"stats": stats(norm_min=0.0)}, Reason.DEGENERATE),
    ("no stats", {"stats": ()}, Reason.UNREADABLE),
    ("newer schema", {"schema": 2}, Reason.UNREADABLE),
    ("no checksum", {"checksum": "md5"}, Reason.UNREADABLE),
]


@pytest.mark.parametrize(("what", "changes", "reason"), REFUSALS, ids=[what for what, _, _ in REFUSALS])
def test_a_refused_dump_ends_its_attempt_and_goes_to_quarantine(
    desk: Desk, failures: Callable[[Reason], float], what: str, changes: dict[str, Any], reason: Reason
) -> None:
    claim(desk.bus, desk.site, [SAMPLE])
    ids = [9] * 12 if what == "other ids" else SAMPLE.token_ids
    path = publish(desk.folder.path, SAMPLE.request(), ids, **changes)
    desk.look()
    desk.look(5)
    assert not path.exists()
    assert desk.jobs() == []
    verdict = desk.kept(SAMPLE.request())
    assert (verdict["reason"], verdict["request"], verdict["site"]) == (reason, str(SAMPLE.request()), desk.site)
    assert verdict["detail"]
    view = desk.bus.runs.get(RUN)
    assert view is not None
    assert (view.verdicts, view.mismatches, view.reasons) == (1, 1, {reason: 1})
    assert view.in_flight == 0
    assert failures(reason) == 1
    assert desk.bus.runs.dead(RUN) == [(str(SAMPLE.request()), 1, reason)]


def test_another_width_is_refused_by_its_shape(desk: Desk) -> None:
    claim(desk.bus, desk.site, [SAMPLE])
    make_dump(desk.folder.path, SAMPLE.request(), SAMPLE.token_ids, BOUNDARIES, HIDDEN // 2)
    desk.look()
    assert desk.kept(SAMPLE.request())["reason"] == Reason.SHAPE


def test_too_few_rows_are_refused_by_their_count(desk: Desk) -> None:
    claim(desk.bus, desk.site, [SAMPLE])
    make_dump(desk.folder.path, SAMPLE.request(), SAMPLE.token_ids[:5], BOUNDARIES, HIDDEN)
    desk.look()
    assert desk.kept(SAMPLE.request())["reason"] == Reason.TOKEN_COUNT


@pytest.mark.parametrize("data", [b"", b"torn", b"\xff" * 64, b"\x02\x00\x00\x00\x00\x00\x00\x00[]"])
def test_a_torn_file_is_unreadable(desk: Desk, data: bytes) -> None:
    claim(desk.bus, desk.site, [SAMPLE])
    (desk.folder.path / f"{SAMPLE.request()}.safetensors").write_bytes(data)
    desk.look()
    assert desk.kept(SAMPLE.request())["reason"] == Reason.UNREADABLE


def test_a_file_that_was_cut_is_unreadable(desk: Desk) -> None:
    claim(desk.bus, desk.site, [SAMPLE])
    path = make_dump(desk.folder.path, SAMPLE.request(), SAMPLE.token_ids, BOUNDARIES, HIDDEN)
    os.truncate(path, path.stat().st_size - 1)
    desk.look()
    assert desk.kept(SAMPLE.request())["reason"] == Reason.UNREADABLE


@pytest.mark.parametrize(
    ("changes", "reason"),
    [({"engine": "another"}, Reason.ENGINE_CHANGED), ({"weight_version": "v2"}, Reason.WEIGHTS_CHANGED)],
)
def test_rows_of_another_engine_than_the_first_are_refused(desk: Desk, changes: dict[str, Any], reason: Reason) -> None:
    other = make_sample(1)
    claim(desk.bus, desk.site, [SAMPLE, other])
    desk.dump()
    desk.look()
    desk.dump(other, **changes)
    desk.look()
    assert desk.kept(other.request())["reason"] == reason
    assert len(desk.jobs()) == 1


def test_a_run_that_nobody_knows_is_a_mismatch_after_the_grace(desk: Desk, failures: Callable[[Reason], float]) -> None:
    request = RequestId.make("nowhere", 3, "nonce000", SAMPLE.token_ids)
    path = publish(desk.folder.path, request, SAMPLE.token_ids)
    desk.look()
    desk.look(GRACE - 1)
    assert path.exists()
    desk.look(1)
    assert not path.exists()
    assert desk.kept(request)["reason"] == Reason.UNKNOWN_RUN
    assert MATCH_FAILURES.labels("nowhere", Reason.UNKNOWN_RUN)._value.get() == 1
    assert failures(Reason.UNKNOWN_RUN) == 0
    assert desk.bus.runs.names() == [RUN]


def test_a_run_that_is_known_in_time_gets_its_dump(desk: Desk) -> None:
    sample = make_sample(1)
    request = RequestId.make("late", sample.ordinal, "nonce000", sample.token_ids)
    path = publish(desk.folder.path, request, sample.token_ids)
    desk.look()
    desk.bus.runs.create(make_spec(desk.scratch / "late", run="late", total=8))
    desk.look(RETRY)
    desk.look(GRACE)
    assert not path.exists()
    assert not (desk.scratch / "quarantine").exists()


@pytest.mark.parametrize("state", ["unknown", "done", "failed"])
def test_a_dump_that_nobody_waits_for_is_swept_and_counts_as_neither(
    desk: Desk, failures: Callable[[Reason], float], state: str
) -> None:
    request = SAMPLE.request()
    if state != "unknown":
        claim(desk.bus, desk.site, [SAMPLE])
    if state == "done":
        desk.bus.requests.stored(request, desk.site, 100)
    if state == "failed":
        for attempt in range(3):
            if attempt:
                claim(desk.bus, desk.site, [SAMPLE], attempt)
            desk.bus.requests.end(SAMPLE.request(attempt), burn=True, kind="error", reason="lapsed")
    path = desk.dump()
    desk.look()
    desk.look(GRACE - 1)
    assert path.exists()
    desk.look(1)
    assert not path.exists()
    assert desk.jobs() == []
    assert sum(failures(reason) for reason in Reason) == 0
    view = desk.bus.runs.get(RUN)
    assert view is not None
    assert view.verdicts == 0


def test_a_refused_dump_of_an_unknown_request_counts_as_neither(
    desk: Desk, failures: Callable[[Reason], float]
) -> None:
    desk.dump(boundaries=(1, 2, 3))
    desk.look()
    assert desk.kept(SAMPLE.request())["reason"] == Reason.LAYERS
    assert failures(Reason.LAYERS) == 0


def test_the_second_dump_of_a_sample_goes_and_counts_as_neither(
    desk: Desk, failures: Callable[[Reason], float]
) -> None:
    claim(desk.bus, desk.site, [SAMPLE])
    desk.bus.requests.end(SAMPLE.request(), burn=True, kind="error", reason="lapsed")
    claim(desk.bus, desk.site, [SAMPLE], attempt=1)
    first, verdicts = desk.dump(attempt=1), VERDICTS.labels(RUN)._value.get()
    desk.look()
    second = desk.dump()
    desk.look()
    assert first.exists()
    assert not second.exists()
    assert [job.request for job in desk.jobs()] == [str(SAMPLE.request(1))]
    assert VERDICTS.labels(RUN)._value.get() == verdicts + 1
    assert sum(failures(reason) for reason in Reason) == 0


def test_a_duplicate_that_cannot_be_removed_counts_once(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    claim(desk.bus, desk.site, [SAMPLE])
    desk.bus.requests.end(SAMPLE.request(), burn=True, kind="error", reason="lapsed")
    claim(desk.bus, desk.site, [SAMPLE], attempt=1)
    desk.dump()
    desk.look()
    second, before = desk.dump(attempt=1), DUPLICATES.labels(RUN)._value.get()

    def refuse(path: Path, missing_ok: bool = False) -> None:
        raise PermissionError(13, "denied", str(path))

    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", refuse)
        for _ in range(3):
            desk.look(GRACE)
        assert second.exists()
    assert DUPLICATES.labels(RUN)._value.get() == before + 1
    desk.look(GRACE)
    assert not second.exists()
    assert DUPLICATES.labels(RUN)._value.get() == before + 1


@pytest.mark.parametrize("reason", sorted(LOST_REASONS))
def test_a_notice_ends_the_attempt_by_its_reason(
    desk: Desk, failures: Callable[[Reason], float], reason: Reason
) -> None:
    claim(desk.bus, desk.site, [SAMPLE])
    losses = LOSSES_TOTAL.labels(reason)._value.get()
    path = lose(desk.folder.path, SAMPLE.request(), reason)
    desk.look()
    assert not path.exists()
    view = desk.bus.runs.get(RUN)
    assert view is not None
    assert (view.pending, view.in_flight) == (8, 0)
    mismatch = reason in (Reason.PREFIX_CACHED, Reason.INCOMPLETE)
    assert view.mismatches == int(mismatch)
    assert failures(reason) == int(mismatch)
    assert LOSSES_TOTAL.labels(reason)._value.get() == losses + int(not mismatch)
    burnt = [] if reason is Reason.NO_ROOM else [(str(SAMPLE.request()), 1, reason)]
    assert desk.bus.runs.dead(RUN) == burnt


@pytest.mark.parametrize(
    "data", [b"", b"[]", b'{"schema": 9}', b'{"schema": 1}', b"\xff\xfe", b'{"schema": 1, "reason": "layers"}']
)
def test_a_notice_that_says_nothing_is_an_internal_loss(desk: Desk, data: bytes) -> None:
    claim(desk.bus, desk.site, [SAMPLE])
    path = desk.folder.path / f"{SAMPLE.request()}{LOST_SUFFIX}"
    path.write_bytes(data)
    desk.look()
    assert not path.exists()
    assert [reason for _, _, reason in desk.bus.runs.dead(RUN)] == [Reason.INTERNAL]


@pytest.mark.parametrize("reason", ["brand_new", "layers", "", "duplicate"])
def test_a_notice_with_a_reason_that_no_plugin_gives_is_an_internal_loss(desk: Desk, reason: str) -> None:
    claim(desk.bus, desk.site, [SAMPLE])
    lose(desk.folder.path, SAMPLE.request(), reason)
    desk.look()
    assert [reason for _, _, reason in desk.bus.runs.dead(RUN)] == [Reason.INTERNAL]


def test_a_notice_beside_a_captured_dump_does_not_take_the_sample_back(desk: Desk) -> None:
    claim(desk.bus, desk.site, [SAMPLE])
    desk.dump()
    notice = lose(desk.folder.path, SAMPLE.request(), "evicted")
    desk.look()
    assert not notice.exists()
    assert desk.bus.requests.begin_store(SAMPLE.request(), 1, desk.site) == "go"

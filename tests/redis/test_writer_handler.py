"""The writer's jobs over a real Redis: every gap between row, line, `stored` and unlink."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from headrace.bus import Bus, keys
from headrace.bus.values import DESTINATION_FULL, RunView, Site
from headrace.errors import Conflict, Unavailable, Unreadable
from headrace.messages import Record, RecordJob
from headrace.runs import Identity
from headrace.settings import load_settings
from headrace_writer.destination import DestinationFull
from headrace_writer.handler import Handler
from headrace_writer.store import Store
from tests.support.dumps import ENGINE, MODEL, WEIGHTS
from tests.support.filesystems import fill, small_tmpfs
from tests.support.stores import (
    BOUNDARIES,
    HIDDEN,
    RUN,
    Sample,
    assert_stored,
    lines_of,
    make_sample,
    submit_to,
)

pytestmark = pytest.mark.redis

MakeHandler = Callable[..., Handler]
IDENTITY = Identity(engine=ENGINE, weight_version=WEIGHTS)
SITE = Site(
    site="s1",
    url="http://127.0.0.1:1",
    boot="boot",
    incarnation="i",
    model=MODEL,
    boundaries=BOUNDARIES,
    final_state="pre_norm",
    hidden_size=HIDDEN,
    dtype="BF16",
    fingerprint=ENGINE,
    weight_version=WEIGHTS,
    final_norm=True,
    context_length=8192,
    max_requests=8,
    max_tokens=10_000,
    dump_cap_bytes=1 << 30,
    dump_bytes=0,
)


@pytest.fixture
def dumps(tmp_path: Path) -> Path:
    folder = tmp_path / "dumps"
    folder.mkdir()
    return folder


@pytest.fixture
def output(tmp_path: Path) -> Path:
    return tmp_path / "dataset"


@pytest.fixture
def make_handler(bus: Bus, tmp_path: Path, dumps: Path, output: Path) -> Iterator[MakeHandler]:
    """Makes a writer over a run of ten samples that were fed."""
    made: list[Handler] = []

    def make(folder: Path = output, **changes: Any) -> Handler:
        bus.runs.create(submit_to(folder, total=10, **changes))
        bus.runs.activate(RUN)
        bus.sites.register(SITE, 60)
        bus.runs.feed(RUN, 0, [""] * 10)
        made.append(Handler(bus, "s1", dumps, "w1", load_settings(quarantine_dir=tmp_path / "quarantine")))
        return made[-1]

    yield make
    for handler in made:
        handler.close()


@pytest.fixture
def handler(make_handler: MakeHandler) -> Handler:
    return make_handler()


def capture(bus: Bus, sample: Sample, attempt: int = 0) -> None:
    """Claim and capture one attempt."""
    assert bus.requests.claim(RUN, "s1", "boot", [sample.opened(attempt)]) == ["claimed"]
    assert bus.requests.capture(sample.request(attempt), "s1", 1000, IDENTITY).outcome == "captured"


def view_of(bus: Bus) -> RunView:
    view = bus.runs.get(RUN)
    assert view is not None
    return view


def test_a_job_stores_a_row_says_so_and_removes_the_dump(bus: Bus, handler: Handler, dumps: Path, output: Path) -> None:
    sample = make_sample()
    capture(bus, sample)
    path = sample.dump(dumps)
    handler(sample.job())
    assert_stored(output, [sample])
    assert not path.exists()
    assert view_of(bus).stored == 1
    handler(sample.job())
    assert view_of(bus).stored == 1
    assert len(lines_of(output)) == 1


def test_a_job_whose_request_is_not_the_captured_one_does_nothing(
    bus: Bus, handler: Handler, dumps: Path, output: Path
) -> None:
    sample = make_sample()
    capture(bus, sample)
    path = sample.dump(dumps, attempt=1)
    handler(sample.job(attempt=1))
    handler(sample.job(job=2))
    assert path.exists()
    assert view_of(bus).stored == 0
    assert not output.exists() or lines_of(output) == []


def test_a_line_without_stored_in_redis_is_found_and_the_dump_not_written_again(
    bus: Bus, handler: Handler, dumps: Path, output: Path
) -> None:
    sample = make_sample()
    capture(bus, sample)
    sample.dump(dumps)
    handler(sample.job())
    # Redis set back to before `stored`, and the sample captured again from another dump.
    bus.redis.setbit(keys.done(RUN), sample.ordinal, 0)
    bus.redis.hincrby(keys.run(RUN), "stored", -1)
    bus.redis.hset(keys.opened(RUN), str(sample.ordinal), "pending|0|||0|")
    bus.redis.rpush(keys.pending(RUN), sample.ordinal)
    capture(bus, sample, attempt=1)
    second = sample.dump(dumps, attempt=1)
    handler(sample.job(attempt=1))
    assert view_of(bus).stored == 1
    assert not second.exists()
    assert len(lines_of(output)) == 1
    assert_stored(output, [sample])


def test_a_corrupt_dump_is_quarantined_and_its_sample_pending_again(
    bus: Bus, handler: Handler, dumps: Path, tmp_path: Path
) -> None:
    sample = make_sample()
    capture(bus, sample)
    path = sample.dump(dumps)
    with path.open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"\x7f")
    handler(sample.job())
    assert not path.exists()
    kept = tmp_path / "quarantine" / str(sample.request())
    assert {entry.name for entry in kept.iterdir()} == {"dump.safetensors", "verdict.json"}
    view = view_of(bus)
    assert (view.stored, view.mismatches, view.reasons) == (0, 1, {"corrupt": 1})
    assert sample.ordinal in bus.runs.pending(RUN, 100)


def test_a_full_destination_pauses_the_run_and_burns_nothing(
    bus: Bus, tmp_path: Path, dumps: Path, make_handler: MakeHandler
) -> None:
    with small_tmpfs(tmp_path / "small", 256) as place:
        handler = make_handler(place / "dataset")
        first, second = make_sample(1), make_sample(2, tokens=600)  # 86 KB
        capture(bus, first)
        first.dump(dumps)
        handler(first.job())
        capture(bus, second)
        path = second.dump(dumps)
        filler = fill(place, leave=8192)
        for _ in range(3):
            with pytest.raises(DestinationFull):
                handler(second.job())
            view = view_of(bus)
            assert (view.state, view.reason) == ("paused", DESTINATION_FULL)
        assert path.exists()
        assert view_of(bus).reasons == {}
        filler.unlink()
        handler(second.job())  # the storing lease brings the job again
        assert view_of(bus).stored == 2
        assert_stored(place / "dataset", [first, second])


def test_a_destination_that_comes_and_goes_is_not_read_anew(
    bus: Bus, dumps: Path, output: Path, handler: Handler
) -> None:
    first, second = make_sample(1), make_sample(2)
    for sample in (first, second):
        capture(bus, sample)
        sample.dump(dumps)
    handler(first.job())
    (index,) = [index for _, index in handler._indexes.values()]
    away = output.rename(output.with_name("away"))
    output.write_text("not a folder")
    for _ in range(3):
        with pytest.raises(Unavailable):
            handler(second.job())
    output.unlink()
    away.rename(output)
    handler(second.job())
    assert [kept for _, kept in handler._indexes.values()] == [index]
    assert index.status(first.ordinal) == "stored"
    assert view_of(bus).state == "active"
    assert_stored(output, [first, second])


def test_a_job_that_raises_again_and_again_ends_its_attempt(
    bus: Bus, handler: Handler, dumps: Path, tmp_path: Path
) -> None:
    sample = make_sample()
    capture(bus, sample)
    path = sample.dump(dumps)
    poison = sample.job(sample="\ud800")  # half a surrogate pair, which no line takes
    for _ in range(9):
        with pytest.raises(TypeError, match="surrogates"):
            handler(poison)
        assert path.exists()
        assert view_of(bus).reasons == {}
    handler(poison)
    assert not path.exists()
    verdict = json.loads((tmp_path / "quarantine" / str(sample.request()) / "verdict.json").read_text())
    assert verdict["reason"] == "internal"
    assert "TypeError" in verdict["detail"]
    view = view_of(bus)
    assert (view.stored, view.mismatches, view.reasons) == (0, 0, {"internal": 1})
    assert sample.ordinal in bus.runs.pending(RUN, 100)
    capture(bus, sample, attempt=1)
    sample.dump(dumps, attempt=1)
    handler(sample.job(attempt=1))
    assert view_of(bus).stored == 1


def test_jobs_of_a_run_that_its_folder_pauses_do_not_count(
    bus: Bus, handler: Handler, dumps: Path, output: Path
) -> None:
    sample = make_sample()
    capture(bus, sample)
    path = sample.dump(dumps)
    (output / "headrace.json").write_bytes(b"{")
    for _ in range(25):
        with pytest.raises(Unreadable):
            handler(sample.job())
    assert path.exists()
    assert (view_of(bus).state, view_of(bus).reasons) == ("paused", {})
    (output / "headrace.json").unlink()
    bus.runs.activate(RUN)
    handler(sample.job())
    assert view_of(bus).stored == 1


def test_a_failed_sample_whose_row_is_there_counts_as_stored(bus: Bus, dumps: Path, make_handler: MakeHandler) -> None:
    handler = make_handler(max_attempts=1)
    first, sample = make_sample(1), make_sample()
    for each in (first, sample):
        capture(bus, each)
    first.dump(dumps)
    handler(first.job())
    spec = bus.runs.spec(RUN)
    assert spec is not None
    killed = Store(Path(spec.output), spec, "killed")
    assert killed._from_dump(sample.job(), sample.dump(dumps)) is not None
    killed.close()
    assert bus.requests.end(sample.request(), burn=True, kind="error", reason="dump_gone") == "failed"
    record = Record(
        ordinal=sample.ordinal,
        sample=sample.name,
        status="failed",
        reason="dump_gone",
        request=str(sample.request()),
        tokens=len(sample.token_ids),
        mask=sample.mask,
    )
    handler(RecordJob(run=RUN, records=(record,)))
    view = view_of(bus)
    assert (view.stored, view.failed, view.failed_by) == (2, 0, {})
    assert_stored(Path(spec.output), [first, sample])


def test_lines_of_rejected_samples_are_written_once(bus: Bus, handler: Handler, output: Path) -> None:
    assert bus.requests.reject(RUN, 3, "exceeds_engine")
    record = Record(ordinal=3, sample="sample-3", status="rejected", reason="exceeds_engine", request="", tokens=0)
    job = RecordJob(run=RUN, records=(record,))
    handler(job)
    handler(job)
    view = view_of(bus)
    assert (view.rejected, view.rejected_by) == (1, {"exceeds_engine": 1})
    assert [(line.ordinal, line.status) for line in lines_of(output)] == [(3, "rejected")]


def test_a_folder_that_was_removed_is_not_made_again_and_pauses_the_run(
    bus: Bus, handler: Handler, dumps: Path, output: Path
) -> None:
    first, second = make_sample(1), make_sample(2)
    for sample in (first, second):
        capture(bus, sample)
        sample.dump(dumps)
    handler(first.job())
    away = output.rename(output.with_name("away"))
    with pytest.raises(Conflict, match="mount or restore"):
        handler(second.job())
    assert not output.exists()
    assert view_of(bus).state == "paused"
    away.rename(output)
    bus.runs.activate(RUN)
    handler(second.job())
    assert_stored(output, [first, second])


def test_a_pause_by_hand_takes_the_place_of_one_that_would_end_by_itself(bus: Bus, handler: Handler) -> None:
    bus.runs.pause(RUN, DESTINATION_FULL)
    bus.runs.pause(RUN, "by hand", by_hand=True)
    assert bus.runs.activate(RUN, paused_for=DESTINATION_FULL) == "paused"
    bus.runs.pause(RUN, DESTINATION_FULL)
    assert view_of(bus).reason == "by hand"
    assert bus.runs.activate(RUN) == "active"

"""The writer's jobs over a real Redis: every gap between row, line, `stored` and unlink."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from headrace.bus import Bus, keys
from headrace.bus.values import DESTINATION_FULL, Attempt, Site
from headrace.messages import Record, RecordJob
from headrace.runs import Identity
from headrace.settings import load_settings
from headrace_writer.destination import DestinationFull
from headrace_writer.handler import Handler
from tests.support.dumps import ENGINE, MODEL, WEIGHTS
from tests.support.stores import BOUNDARIES, HIDDEN, RUN, Sample, assert_stored, lines_of, make_sample, make_spec

pytestmark = pytest.mark.redis

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
def handler(bus: Bus, tmp_path: Path, dumps: Path, output: Path) -> Iterator[Handler]:
    """A writer over a run of ten samples that were fed."""
    bus.runs.create(make_spec(output, total=10))
    bus.runs.activate(RUN)
    bus.sites.register(SITE, 60)
    bus.runs.feed(RUN, 0, [""] * 10)
    made = Handler(bus, "s1", dumps, "w1", load_settings(quarantine_dir=tmp_path / "quarantine"))
    yield made
    made.close()


def capture(bus: Bus, sample: Sample, attempt: int = 0) -> None:
    """Claim and capture one attempt."""
    request = sample.request(attempt)
    opened = Attempt(
        ordinal=sample.ordinal,
        request=str(request),
        tokens=request.tokens,
        dump_bytes=1000,
        sample=sample.name,
        mask=sample.mask,
    )
    assert bus.requests.claim(RUN, "s1", "boot", [opened]) == ["claimed"]
    assert bus.requests.capture(request, "s1", 1000, IDENTITY).outcome == "captured"


def stored(bus: Bus) -> int:
    view = bus.runs.get(RUN)
    assert view is not None
    return view.stored


def test_a_job_stores_a_row_says_so_and_removes_the_dump(bus: Bus, handler: Handler, dumps: Path, output: Path) -> None:
    sample = make_sample()
    capture(bus, sample)
    path = sample.dump(dumps)
    handler(sample.job())
    assert_stored(output, [sample])
    assert not path.exists()
    assert stored(bus) == 1
    handler(sample.job())
    assert stored(bus) == 1
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
    assert stored(bus) == 0
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
    assert stored(bus) == 1
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
    view = bus.runs.get(RUN)
    assert view is not None
    assert (view.stored, view.mismatches, view.reasons) == (0, 1, {"corrupt": 1})
    assert sample.ordinal in bus.runs.pending(RUN, 100)


def test_a_full_destination_pauses_the_run_and_burns_nothing(
    bus: Bus, handler: Handler, dumps: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sample = make_sample()
    capture(bus, sample)
    path = sample.dump(dumps)

    def full(*_: object) -> None:
        raise DestinationFull("no space left")

    with monkeypatch.context() as patch:
        patch.setattr("headrace_writer.store.Store.store", full)
        with pytest.raises(DestinationFull):
            handler(sample.job())
    view = bus.runs.get(RUN)
    assert view is not None
    assert (view.state, view.reason) == ("paused", DESTINATION_FULL)
    assert path.exists()
    handler(sample.job())  # the storing lease brings the job again
    assert stored(bus) == 1


def test_lines_of_rejected_samples_are_written_once(bus: Bus, handler: Handler, output: Path) -> None:
    assert bus.requests.reject(RUN, 3, "exceeds_engine")
    record = Record(ordinal=3, sample="sample-3", status="rejected", reason="exceeds_engine", request="", tokens=0)
    job = RecordJob(run=RUN, records=(record,))
    handler(job)
    handler(job)
    view = bus.runs.get(RUN)
    assert view is not None
    assert (view.rejected, view.rejected_by) == (1, {"exceeds_engine": 1})
    assert [(line.ordinal, line.status) for line in lines_of(output)] == [(3, "rejected")]

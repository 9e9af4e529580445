"""What a writer does when a run's final norm cannot be had: it pauses or waits, says why, and loses nothing."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from headrace.bus import Bus
from headrace.dumpfolder import read_norm
from headrace.errors import Unavailable, Unreadable, UsageError
from headrace.finalnorm import NORM_FILE
from headrace.runs import Identity
from headrace.settings import load_settings
from headrace_writer import formats
from headrace_writer.handler import Handler
from tests.support.bus_values import make_site
from tests.support.dumps import ENGINE, WEIGHTS, make_norm
from tests.support.stores import HIDDEN, RUN, Sample, make_sample, submit_to
from tests.support.watched import declare

NORM = make_norm(HIDDEN)
FORM = formats.get("specforge")


@pytest.fixture
def dumps(tmp_path: Path) -> Path:
    (tmp_path / "dumps").mkdir()
    return tmp_path / "dumps"


@pytest.fixture
def handler(bus: Bus, tmp_path: Path, dumps: Path) -> Iterator[Handler]:
    """A writer over a run in format `specforge`, of which one sample is captured."""
    bus.runs.create(submit_to(tmp_path / "dataset", format="specforge", total=10))
    bus.runs.activate(RUN)
    bus.sites.register(make_site("s1", boot="boot", max_tokens=1000, dump_cap_bytes=1 << 20), 60)
    bus.runs.feed(RUN, 0, [""] * 10)
    sample = make_sample()
    assert bus.requests.claim(RUN, "s1", "boot", [sample.opened()]) == ["claimed"]
    identity = Identity(engine=ENGINE, weight_version=WEIGHTS)
    assert bus.requests.capture(sample.request(), "s1", 1000, identity).outcome == "captured"
    made = Handler(bus, "s1", dumps, "w1", load_settings(quarantine_dir=tmp_path / "quarantine"))
    yield made
    made.close()


def assert_stored_in_the_end(bus: Bus, handler: Handler, sample: Sample, output: Path) -> None:
    assert bus.runs.activate(RUN) == "active"
    handler(sample.job())
    view = bus.runs.get(RUN)
    assert view is not None
    assert (view.stored, view.reasons, view.state) == (1, {}, "active")
    assert (output / FORM.path(sample.ordinal)).is_file()


@pytest.mark.parametrize(
    "kept",
    [make_norm(HIDDEN, seed=8).encode(), make_norm(HIDDEN // 2).encode(), b"torn"],
    ids=["another", "narrow", "torn"],
)
def test_a_run_whose_norm_cannot_be_had_is_paused_with_the_reason_and_loses_nothing(
    bus: Bus, tmp_path: Path, dumps: Path, handler: Handler, kept: bytes
) -> None:
    sample, output = make_sample(), tmp_path / "dataset"
    path = sample.dump(dumps)
    place = output / NORM_FILE
    place.write_bytes(kept)
    declare(dumps, NORM)
    for _ in range(12):
        with pytest.raises(Unreadable):
            handler(sample.job())
    view = bus.runs.get(RUN)
    assert view is not None
    assert (view.state, view.reasons) == ("paused", {})
    assert "remove it, then resume" in view.reason
    assert path.exists()
    place.unlink()
    assert_stored_in_the_end(bus, handler, sample, output)


def test_a_dump_waits_for_its_own_engine_while_another_is_there(
    bus: Bus, tmp_path: Path, dumps: Path, handler: Handler
) -> None:
    sample, output = make_sample(), tmp_path / "dataset"
    path = sample.dump(dumps)
    declare(dumps, make_norm(HIDDEN, seed=8))
    with pytest.raises(Unavailable, match="bring it back"):
        handler(sample.job())
    assert path.exists()
    assert not (output / NORM_FILE).exists()
    declare(dumps, NORM, boot="otherotherot")
    assert_stored_in_the_end(bus, handler, sample, output)
    assert read_norm(output / NORM_FILE) == NORM


def test_a_run_waits_for_an_engine_that_starts(bus: Bus, tmp_path: Path, dumps: Path, handler: Handler) -> None:
    sample = make_sample()
    sample.dump(dumps)
    for _ in range(12):
        with pytest.raises(Unavailable):
            handler(sample.job())
    view = bus.runs.get(RUN)
    assert view is not None
    assert (view.state, view.reasons) == ("active", {})
    declare(dumps, NORM)
    assert_stored_in_the_end(bus, handler, sample, tmp_path / "dataset")


@pytest.mark.parametrize(
    ("found", "says"),
    [
        (None, "pip install 'headrace[trainers]', then: headrace resume tale"),
        (ModuleType("torch"), "--force-reinstall torch, start the writer again, then: headrace resume tale"),
    ],
    ids=["none", "half"],
)
def test_a_writer_without_a_whole_torch_pauses_the_run_and_names_the_next_step(
    bus: Bus,
    tmp_path: Path,
    dumps: Path,
    handler: Handler,
    found: ModuleType | None,
    says: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sample = make_sample()
    sample.dump(dumps)
    declare(dumps, NORM)
    monkeypatch.setitem(sys.modules, "torch", found)
    monkeypatch.delitem(sys.modules, "headrace_writer.formats.rmsnorm", raising=False)
    for _ in range(12):
        with pytest.raises(UsageError):
            handler(sample.job())
    view = bus.runs.get(RUN)
    assert view is not None
    assert (view.state, view.reasons) == ("paused", {})
    assert says in view.reason
    monkeypatch.undo()
    assert_stored_in_the_end(bus, handler, sample, tmp_path / "dataset")

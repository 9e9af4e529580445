from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from headrace.quarantine import Quarantine
from headrace.reasons import Reason
from headrace.verdicts import Refusal
from tests.support.stores import Sample, make_sample

REFUSAL = Refusal(reason=Reason.SHAPE, detail="why")


def take(quarantine: Quarantine, dumps: Path, sample: Sample) -> Path:
    path = sample.dump(dumps)
    quarantine.take(path, sample.request(), REFUSAL, "site")
    assert not path.exists()
    return quarantine.folder / str(sample.request())


def test_a_refused_dump_is_kept_with_its_verdict(tmp_path: Path) -> None:
    kept = take(Quarantine(tmp_path / "q", 1 << 20), tmp_path, make_sample())
    verdict = json.loads((kept / "verdict.json").read_text())
    assert (verdict["request"], verdict["reason"], verdict["site"]) == (kept.name, "shape", "site")
    assert (kept / "dump.safetensors").stat().st_size > 0


def test_a_quarantine_of_no_bytes_keeps_nothing(tmp_path: Path) -> None:
    for ordinal in range(3):
        take(Quarantine(tmp_path / "q", 0), tmp_path, make_sample(ordinal))
    assert not (tmp_path / "q").exists()


@pytest.mark.parametrize("room", [1, 100, 4096, 20_000])
def test_small_dumps_count_as_a_block_so_that_folders_are_bounded_too(tmp_path: Path, room: int) -> None:
    quarantine = Quarantine(tmp_path / "q", room)
    for ordinal in range(12):
        kept = take(quarantine, tmp_path, make_sample(ordinal, tokens=2))
        os.utime(kept, (ordinal, ordinal))
        (kept / "dump.safetensors").write_bytes(b"x")
        names = sorted(path.name for path in quarantine.folder.iterdir())
        assert kept.name in names, "the latest one is kept in any case"
        assert len(names) <= max(1, room // 4096)

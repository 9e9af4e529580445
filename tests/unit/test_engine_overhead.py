"""bench.engine_overhead without a server: what its taker makes of a dump folder, and its report of figures."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.engine_overhead.course import OFF, ON, REFERENCE, Measurement
from bench.engine_overhead.load import Sent, bodies
from bench.engine_overhead.processes import CpuSeconds
from bench.engine_overhead.report import line, ratios, table
from bench.engine_overhead.shapes import SHAPES, model_of
from bench.engine_overhead.taker import Taken, Taker
from headrace.boundaries import EAGLE3, resolve_boundaries
from headrace.dumps import ENGINE_FILE, LOST_SUFFIX, EngineCard, Lost, encode_json
from headrace.ids import RequestId, is_ours
from tests.support.dumps import make_dump

BOUNDARIES, HIDDEN = (2, 4, 5), 16
CARD = EngineCard(
    boot="a" * 12,
    model="tiny",
    fingerprint="tiny",
    weight_version="default",
    boundaries=BOUNDARIES,
    final_state="pre_norm",
    layers=8,
    hidden_size=HIDDEN,
    dtype="BF16",
    norm_file="",
)


def _request(run: str, ordinal: int, token_ids: range) -> RequestId:
    return RequestId.make(run, ordinal, "aaaaaaaa", token_ids)


def test_the_taker_counts_judges_and_removes_what_requests_leave(tmp_path: Path) -> None:
    (tmp_path / ENGINE_FILE).write_bytes(encode_json(CARD))
    good, other, wrong, damaged, lost = (_request("one", ordinal, range(ordinal, ordinal + 9)) for ordinal in range(5))
    with Taker(tmp_path, every=1) as taker:
        for directory, request, ids, changes in (
            (tmp_path / "good", good, range(9), {}),
            (tmp_path / "other", other, range(1, 10), {}),
            (tmp_path / "wrong", wrong, range(3, 12), {}),
            (tmp_path / "damaged", damaged, range(3, 12), {"checksum": "xxh3:" + "0" * 16}),
        ):
            directory.mkdir()
            made = make_dump(directory, request, ids, BOUNDARIES, HIDDEN, changes=changes)
            made.rename(tmp_path / made.name)  # whole from the first moment, as an engine's
        notice = encode_json(Lost(request=str(lost), reason="no_room", detail="full", boot=CARD.boot))
        (tmp_path / "notice").write_bytes(notice)
        (tmp_path / "notice").rename(tmp_path / f"{lost}{LOST_SUFFIX}")
        taken = taker.wait("one", 5, 30)
        assert taker.taken("two").settled == 0
    assert (taken.published, taken.wrong, taken.checksums, taken.lost) == (4, 2, 2, {"no_room": 1})
    assert taken.nbytes == 2 * 9 * (len(BOUNDARIES) + 1) * HIDDEN * 2
    assert any("other token ids" in example for example in taken.examples)
    assert any("damaged" in example for example in taken.examples)
    assert not list(tmp_path.glob("hr-*"))


def test_off_and_on_differ_in_their_ids_alone() -> None:
    lengths = [3, 200]
    ours, others = (bodies("one", lengths, 1000, ours=kind) for kind in (True, False))
    assert [len(body) // 100 for body in ours] == [len(body) // 100 for body in others]
    assert all(is_ours(_rid(body)) for body in ours)
    assert not any(is_ours(_rid(body)) for body in others)


def _rid(body: bytes) -> str:
    return body.decode().split('"rid":"')[1].split('"')[0]


def _measured(mode: str, repetition: int, seconds: float, taken: Taken | None = None) -> Measurement:
    sent = Sent(tokens=1000, began=0.0, seconds=seconds, outcomes={"answered": 4})
    cpu = CpuSeconds(schedulers=1.0, all=2.0)
    return Measurement(mode=mode, repetition=repetition, sent=sent, cpu=cpu, taken=taken)


def test_ratios_are_of_one_repetition_each() -> None:
    measured = [_measured(OFF, 0, 1.0), _measured(ON, 0, 2.0), _measured(ON, 1, 4.0), _measured(OFF, 1, 3.0)]
    assert ratios(measured, ON, OFF) == [0.5, 0.75]
    assert ratios(measured, OFF, REFERENCE) == []
    assert "on/off 0.625 (0.500, 0.750)" in table(measured)


def test_whatever_was_not_published_right_is_a_problem() -> None:
    whole = Taken(published=4, nbytes=4000, last=2.0)
    assert _measured(ON, 0, 1.0, whole).problems == []
    assert _measured(ON, 0, 1.0, whole).bandwidth == 2000
    broken = Taken(published=2, wrong=1, lost={"no_room": 1}, examples=["damaged"], last=1.0)
    problems = _measured(ON, 0, 1.0, broken).problems
    assert problems == ["1 lost: no_room", "1 neither published nor lost", "1 wrong: ['damaged']"]
    assert all(problem in line(_measured(ON, 0, 1.0, broken)) for problem in problems)


@pytest.mark.parametrize("shape", SHAPES)
def test_every_shape_has_the_boundaries_of_eagle3(shape: str, tmp_path: Path) -> None:
    model = model_of(shape, tmp_path)
    assert model.folder.joinpath("config.json").is_file()
    assert len(resolve_boundaries(EAGLE3, SHAPES[shape]["num_hidden_layers"])) == 3
    assert model_of(str(model.folder), tmp_path).vocabulary == model.vocabulary

"""An engine that follows a fault plan: a real process, over HTTP."""

from __future__ import annotations

import signal
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import requests

from headrace.dumpfolder import read_dump, read_lost
from headrace.dumps import DUMP_SUFFIX, LOST_SUFFIX, DumpHeader
from headrace.ids import RequestId
from headrace.reasons import Reason
from headrace_dispatcher.engines import EngineClient
from tests.support.engine import SCRIPT, EngineProcess, engine_environ, random_ids
from tests.support.faults import hits_of, write_plan
from tests.support.waiting import wait_until

pytestmark = pytest.mark.pipeline

CHUNK = 64
SECONDS = 1.0
TIMED = ("slow", "hang", "late")
# The run that a request belongs to says how it goes wrong.
KINDS = (
    "duplicate_rid", "too_long", "abort", "unavailable", "bad_answer", "slow", "cut", "hang", "late",
    "prefix_hit", "lost_part", "no_memory", "capture_fault", "withheld", "nan", "torn",
)  # fmt: skip


class Requests:
    """Requests of runs that are named after faults."""

    def __init__(self, engine: EngineProcess, dump_dir: Path) -> None:
        self.engine = engine
        self.dump_dir = dump_dir
        self._ordinal = 0

    def new(self, kind: str, tokens: int) -> tuple[list[int], str]:
        self._ordinal += 1
        ids = random_ids(tokens, seed=self._ordinal)
        return ids, str(RequestId.make(kind.replace("_", ""), self._ordinal, "abcd0123", ids))

    def wait_dump(self, rid: str) -> DumpHeader:
        path = self.dump_dir / f"{rid}{DUMP_SUFFIX}"
        wait_until(path.exists, what=path.name)
        return read_dump(path).header

    def wait_lost(self, rid: str) -> str:
        path = self.dump_dir / f"{rid}{LOST_SUFFIX}"
        wait_until(path.exists, what=path.name)
        return read_lost(path).reason

    def assert_nothing_comes(self, rid: str) -> None:
        """Another request, which is captured after it, is there."""
        ids, other = self.new("well", 5)
        assert self.engine.generate(ids, other).status_code == 200
        self.wait_dump(other)
        wait_until(lambda: self.engine.in_flight() == 0, what="all requests to end")
        assert list(self.dump_dir.glob(f"{rid}*")) == []


@pytest.fixture(scope="module")
def asked(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Requests]:
    folder = tmp_path_factory.mktemp("faults")
    faults = [
        {"kind": kind, "run": kind.replace("_", ""), **({"seconds": SECONDS} if kind in TIMED else {})}
        for kind in KINDS
    ]
    plan = write_plan(folder / "plan.toml", *faults)
    flags = ("--model", str(tiny), "--model-name", "tiny", "--chunk-tokens", str(CHUNK), "--faults", str(plan))
    environ = {"HEADRACE_DUMP_DIR": str(folder / "dumps")}
    with EngineProcess(folder / "process", *flags, environ=environ) as process:
        yield Requests(process.wait_ready(), folder / "dumps")
        assert process.terminate() == 0
    log = process.log.read_text()
    assert "FAULTS WILL BE PROVOKED" in log
    assert all("a provoked fault" in line for line in log.splitlines() if "Traceback" in line)


def test_a_duplicate_id_is_refused_and_the_first_one_is_captured(asked: Requests) -> None:
    ids, rid = asked.new("duplicate_rid", 100)
    answer = asked.engine.generate(ids, rid)
    assert (answer.status_code, "Duplicate request ID" in answer.text) == (400, True)
    assert asked.wait_dump(rid).tokens == 100


def test_a_stub_of_a_prompt_that_is_too_long_is_lost(asked: Requests) -> None:
    ids, rid = asked.new("too_long", 100)
    answer = asked.engine.generate(ids, rid)
    assert (answer.status_code, "longer than" in answer.text) == (400, True)
    assert asked.wait_lost(rid) == Reason.INCOMPLETE


def test_a_prompt_of_several_parts_is_aborted_after_the_first(asked: Requests) -> None:
    ids, rid = asked.new("abort", 3 * CHUNK)
    answer = asked.engine.generate(ids, rid)
    assert answer.status_code == 200
    assert answer.json()["meta_info"]["finish_reason"]["type"] == "abort"
    assert asked.wait_lost(rid) == Reason.ABORTED


def test_a_prompt_of_one_part_is_aborted_before_it_runs(asked: Requests) -> None:
    ids, rid = asked.new("abort", CHUNK)
    assert asked.engine.generate(ids, rid).json()["meta_info"]["finish_reason"]["type"] == "abort"
    asked.assert_nothing_comes(rid)


def test_an_engine_is_unavailable_once_and_then_serves_the_sample(asked: Requests) -> None:
    ids, rid = asked.new("unavailable", 9)
    assert asked.engine.generate(ids, rid).status_code == 503
    asked.assert_nothing_comes(rid)
    again = str(RequestId.make("unavailable", RequestId.parse(rid).ordinal, "abcd0124", ids))
    assert asked.engine.generate(ids, again).status_code == 200
    asked.wait_dump(again)


def test_a_page_instead_of_an_answer(asked: Requests) -> None:
    ids, rid = asked.new("bad_answer", 9)
    answer = asked.engine.generate(ids, rid)
    assert (answer.status_code, answer.headers["content-type"]) == (200, "text/html; charset=utf-8")
    asked.assert_nothing_comes(rid)


@pytest.mark.parametrize("kind", ["slow", "hang"])
def test_an_answer_comes_late(asked: Requests, kind: str) -> None:
    ids, rid = asked.new(kind, 9)
    began = time.monotonic()
    assert asked.engine.generate(ids, rid).json()["meta_info"]["id"] == rid
    assert time.monotonic() - began >= SECONDS
    asked.wait_dump(rid)


def test_a_late_dump_comes_after_the_answer(asked: Requests) -> None:
    ids, rid = asked.new("late", 9)
    began = time.monotonic()
    assert asked.engine.generate(ids, rid).status_code == 200
    asked.wait_dump(rid)
    assert time.monotonic() - began >= SECONDS


def test_an_answer_that_is_cut_is_none(asked: Requests) -> None:
    ids, rid = asked.new("cut", 9)
    with pytest.raises(requests.RequestException):
        asked.engine.generate(ids, rid)
    asked.wait_dump(rid)
    ids, rid = asked.new("cut", 9)
    outcome = EngineClient(timeout=30).generate(asked.engine.url, rid, ids)
    assert (outcome.outcome, outcome.reason) == ("unavailable", "connection")


@pytest.mark.parametrize("tokens", [9, 3 * CHUNK - 5])
@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("prefix_hit", Reason.PREFIX_CACHED),
        ("lost_part", Reason.INCOMPLETE),
        ("no_memory", Reason.NO_ROOM),
        ("capture_fault", Reason.INTERNAL),
    ],
)
def test_the_answer_says_what_the_capture_dropped(asked: Requests, kind: str, reason: Reason, tokens: int) -> None:
    ids, rid = asked.new(kind, tokens)
    assert asked.engine.generate(ids, rid).json()["meta_info"]["headrace"] == f"dropped:{reason}"
    assert asked.wait_lost(rid) == reason


def test_the_answer_says_nothing_of_states_that_are_withheld_or_spoilt(asked: Requests) -> None:
    for kind in ("withheld", "nan", "torn"):
        ids, rid = asked.new(kind, 9)
        assert "headrace" not in asked.engine.generate(ids, rid).json()["meta_info"], kind
        if kind == "withheld":
            asked.assert_nothing_comes(rid)
        else:
            wait_until((asked.dump_dir / f"{rid}{DUMP_SUFFIX}").exists, what=kind)


def test_a_fault_acts_beside_a_prefix_cache_as_without(tiny: Path, tmp_path: Path) -> None:
    plan = write_plan(tmp_path / "plan.toml", {"kind": "duplicate_rid", "run": "dup"}, {"kind": "abort", "run": "gone"})
    flags = ("--model", str(tiny), "--chunk-tokens", str(CHUNK), "--prefix-cache", "10000", "--faults", str(plan))
    ids, dumps = random_ids(100, seed=1), tmp_path / "dumps"
    with EngineProcess(tmp_path, *flags, environ={"HEADRACE_DUMP_DIR": str(dumps)}) as engine:
        assert engine.wait_ready().generate(ids).status_code == 200  # somebody else's, without an extra key
        rid = str(RequestId.make("dup", 1, "abcd0123", ids))
        body = {"input_ids": ids, "rid": rid, "extra_key": rid, "sampling_params": {"max_new_tokens": 0}}
        assert engine.post("/generate", body).status_code == 400
        wait_until((dumps / f"{rid}{DUMP_SUFFIX}").exists, what="the first one's dump")
        rid = str(RequestId.make("gone", 1, "abcd0123", ids))
        meta = engine.generate(ids, rid).json()["meta_info"]
        assert (meta["cached_tokens"], meta["finish_reason"]["type"]) == (99, "abort")
        assert not (dumps / f"{rid}{DUMP_SUFFIX}").exists()


def test_a_request_that_is_refused_anyway_is_no_hit(tiny: Path, tmp_path: Path) -> None:
    plan = write_plan(
        tmp_path / "plan.toml", {"kind": "nan", "run": "bad"}, {"kind": "hang", "run": "hang", "seconds": 3600}
    )
    flags = ("--model", str(tiny), "--max-queued", "1", "--context-length", "106", "--faults", str(plan))
    with EngineProcess(tmp_path, *flags) as engine, ThreadPoolExecutor(1) as pool:
        engine.wait_ready()
        for ordinal, ids in enumerate(([], [-1], [1_000_000], random_ids(101, seed=1))):
            rid = str(RequestId.make("bad", ordinal, "abcd0123", [5, 6]))
            assert engine.generate(ids, rid).status_code == 400
        ids = random_ids(9, seed=2)
        hung = pool.submit(engine.generate, ids, str(RequestId.make("hang", 0, "abcd0123", ids)))
        wait_until(lambda: engine.in_flight() == 1, what="the queue to be full")
        assert engine.generate(ids, str(RequestId.make("bad", 9, "abcd0123", ids))).status_code == 503
        assert [hit["kind"] for hit in hits_of(plan)] == ["hang"]
        engine.terminate()  # which ends the hang
        wait_until(hung.done, what="the request that hung to be over")


@pytest.mark.parametrize("tokens", [1, 40, 150])
def test_a_crash_in_the_middle_of_a_prefill_counts_over_boots(tiny: Path, tmp_path: Path, tokens: int) -> None:
    plan = write_plan(tmp_path / "plan.toml", {"kind": "crash", "ordinals": [3]}, starting_seconds=0.5)
    flags = ("--model", str(tiny), "--chunk-tokens", str(CHUNK))
    dumps = tmp_path / "dumps"
    environ = {"HEADRACE_DUMP_DIR": str(dumps), "HEADRACE_ENGINE_FAULTS": str(plan)}
    ids = random_ids(tokens, seed=1)
    first, second = (str(RequestId.make("test", 3, nonce, ids)) for nonce in ("aaaaaaaa", "bbbbbbbb"))
    with EngineProcess(tmp_path / "first", *flags, environ=environ) as engine:
        engine.wait_ready()
        with pytest.raises(requests.ConnectionError):
            engine.generate(ids, first)
        assert engine.process.wait(30) == -signal.SIGKILL
    assert list(dumps.glob("hr-*")) == []
    with EngineProcess(tmp_path / "second", *flags, environ=environ) as engine:
        assert engine.wait_ready().generate(ids, second).status_code == 200
        wait_until((dumps / f"{second}{DUMP_SUFFIX}").exists, what="the dump")
        boot = engine.info()["headrace"]["boot"]
    (hit,) = hits_of(plan)
    assert (hit["kind"], hit["request"], hit["boot"] != boot) == ("crash", first, True)
    assert not [path for path in dumps.iterdir() if first in path.name], "the second boot swept what was hidden"


def test_an_engine_refuses_requests_while_it_starts(tiny: Path, tmp_path: Path) -> None:
    plan = write_plan(tmp_path / "plan.toml", starting_seconds=3600)
    dumps = tmp_path / "dumps"
    environ = {"HEADRACE_DUMP_DIR": str(dumps)}
    with EngineProcess(tmp_path, "--model", str(tiny), "--faults", str(plan), environ=environ) as engine:
        wait_until((dumps / "engine.json").exists, what="the model to be loaded")
        assert engine.status("/health") == 503
        assert engine.generate([5, 6]).status_code == 503
        assert engine.terminate() == 0


@pytest.mark.parametrize(
    ("text", "message"),
    [(None, "plan.toml: No such file"), ("[[fault]]\nkind = 'nan'\nrat = 1", "did you mean 'rate'")],
)
def test_a_plan_that_is_wrong_ends_the_engine_in_one_line(
    tiny: Path, tmp_path: Path, text: str | None, message: str
) -> None:
    plan = tmp_path / "plan.toml"
    if text is not None:
        plan.write_text(text)
    ended = subprocess.run(
        [SCRIPT, "--model", str(tiny), "--port", "0", "--faults", str(plan)],
        env=engine_environ(), stderr=subprocess.PIPE, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert (ended.returncode, ended.stderr.count("\n")) == (2, 1)
    assert ended.stderr.startswith("headrace-engine: fault plan ")
    assert message in ended.stderr

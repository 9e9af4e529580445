"""Fault plans: what is read, what is refused, and which requests are hit, over boots."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.errors import UsageError
from headrace.ids import CANARY, RequestId
from headrace_engine.faults.log import Hits
from headrace_engine.faults.plan import Fault, Kind, Plan, Tally, load_plan
from tests.support.faults import hits_of, write_plan

BOOT = "boot"


def request(ordinal: int, *, run: str = "run", nonce: str = "aaaaaaaa", tokens: int = 9) -> RequestId:
    return RequestId.make(run, ordinal, nonce, range(tokens))


def nonces(count: int) -> list[str]:
    return [f"{number:08d}" for number in range(count)]


def test_a_plan_is_read_with_its_defaults(tmp_path: Path) -> None:
    first = {"kind": "nan", "rate": 0.05, "run": "r1", "ordinals": [3, 5], "times": 2, "count": 10}
    path = write_plan(tmp_path / "plan.toml", first, {"kind": "slow", "seconds": 3}, seed=7, starting_seconds=1)
    assert load_plan(path) == Plan(
        seed=7,
        starting_seconds=1.0,
        faults=(
            Fault(index=0, kind=Kind.NAN, rate=0.05, run="r1", ordinals=frozenset({3, 5}), times=2, count=10),
            Fault(index=1, kind=Kind.SLOW, seconds=3.0),
        ),
    )
    assert load_plan(write_plan(tmp_path / "empty.toml")) == Plan()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("sed = 1", "sed is an unknown key; did you mean 'seed'"),
        ("seed = 1.5", "seed = '1.5': give a whole number"),
        ("starting_seconds = -1", "starting_seconds = '-1': give seconds"),
        ("starting_seconds = nan", "starting_seconds = 'nan': give seconds"),
        ("fault = 1", "fault = '1': give [[fault]] tables"),
        ("[[fault]]\nrate = 1", "fault.0.kind is missing: give a kind of fault"),
        ("[[fault]]\nkind = 'zero_rows'", "fault.0.kind = 'zero_rows': give a kind of fault; did you mean 'zero_row'"),
        ("[[fault]]\nkind = 'nan'\n[[fault]]\nkind = 3", "fault.1.kind = '3'"),
        ("[[fault]]\nkind = 'nan'\nrat = 1", "fault.0.rat is an unknown key; did you mean 'rate'"),
        ("[[fault]]\nkind = 'nan'\nrate = 1.1", "fault.0.rate = '1.1': give the part of the samples"),
        ("[[fault]]\nkind = 'nan'\nrate = true", "fault.0.rate = 'True'"),
        ("[[fault]]\nkind = 'nan'\nrun = 'A'", "fault.0.run = 'A': give a run's name"),
        ("[[fault]]\nkind = 'nan'\nordinals = []", "fault.0.ordinals = '[]': give a list"),
        ("[[fault]]\nkind = 'nan'\nordinals = [0, -1]", "fault.0.ordinals.1 = '-1': give a list"),
        ("[[fault]]\nkind = 'nan'\ntimes = 0", "fault.0.times = '0': give a whole number"),
        ("[[fault]]\nkind = 'nan'\ncount = 0", "fault.0.count = '0': give a whole number"),
        ("[[fault]]\nkind = 'slow'\nseconds = 0", "fault.0.seconds = '0': give seconds"),
        ("[[fault]]\nkind = 'nan'\nseconds = 1", "fault.0.seconds: nan takes none; only hang, late, slow do"),
        ("[[fault", "not TOML"),
    ],
)
def test_what_is_wrong_in_a_plan_is_named(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "plan.toml"
    path.write_text(text)
    with pytest.raises(UsageError) as raised:
        load_plan(path)
    assert message in str(raised.value)
    assert str(path) in str(raised.value)


def test_a_plan_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"nowhere\.toml: No such file"):
        load_plan(tmp_path / "nowhere.toml")
    (tmp_path / "latin.toml").write_bytes(b"run = '\xe9'")
    with pytest.raises(UsageError, match="not TOML"):
        load_plan(tmp_path / "latin.toml")


def test_the_first_fault_that_applies_hits() -> None:
    plan = Plan(
        faults=(
            Fault(index=0, kind=Kind.NAN, ordinals=frozenset({1})),
            Fault(index=1, kind=Kind.LOST_PART),
            Fault(index=2, kind=Kind.TORN),
        )
    )
    chosen = [plan.choose(request(ordinal, tokens=ordinal + 1), Tally()) for ordinal in range(4)]
    assert [fault.kind if fault else None for fault in chosen] == [
        Kind.TORN,  # too short to lose a part
        Kind.NAN,
        Kind.LOST_PART,
        Kind.LOST_PART,
    ]


def test_the_canary_is_hit_only_when_it_is_named() -> None:
    canary = request(0, run=CANARY)
    assert Plan(faults=(Fault(index=0, kind=Kind.NAN),)).choose(canary, Tally()) is None
    named = Plan(faults=(Fault(index=0, kind=Kind.NAN, run=CANARY),))
    assert named.choose(canary, Tally()) is not None
    assert named.choose(request(0), Tally()) is None


@given(seed=st.integers(), rate=st.floats(0, 1), ordinal=st.integers(0, 10**6), others=st.lists(st.integers(0, 99)))
def test_who_is_hit_does_not_depend_on_the_order_or_on_who_came_before(
    seed: int, rate: float, ordinal: int, others: list[int]
) -> None:
    plan = Plan(seed=seed, faults=(Fault(index=0, kind=Kind.NAN, rate=rate),))
    tally = Tally()
    for other in others:
        tally.add(0, request(other, run="other"))
    assert plan.choose(request(ordinal, nonce="zzzzzzzz"), tally) == plan.choose(request(ordinal), Tally())


@given(seed=st.integers(0, 1000), low=st.floats(0, 1), high=st.floats(0, 1))
def test_a_higher_rate_hits_the_same_samples_and_more(seed: int, low: float, high: float) -> None:
    low, high = sorted((low, high))
    few, many = (Fault(index=0, kind=Kind.NAN, rate=rate) for rate in (low, high))
    samples = [request(ordinal) for ordinal in range(50)]
    assert {s.ordinal for s in samples if few.wants(s, seed)} <= {s.ordinal for s in samples if many.wants(s, seed)}


def test_a_rate_hits_about_so_many_samples_and_other_ones_for_another_seed_run_or_fault() -> None:
    def hit(index: int, seed: int, run: str) -> frozenset[int]:
        fault = Fault(index=index, kind=Kind.NAN, rate=0.1)
        return frozenset(n for n in range(2000) if fault.wants(request(n, run=run), seed))

    drawn = [hit(0, 0, "run"), hit(1, 0, "run"), hit(0, 1, "run"), hit(0, 0, "other")]
    assert all(120 < len(ordinals) < 280 for ordinals in drawn)
    assert len(set(drawn)) == len(drawn)
    everybody = Fault(index=0, kind=Kind.NAN)
    nobody = Fault(index=0, kind=Kind.NAN, rate=0.0)
    assert all(everybody.wants(request(n), 0) and not nobody.wants(request(n), 0) for n in range(100))


def test_times_and_count_hold_over_boots(tmp_path: Path) -> None:
    path = write_plan(tmp_path / "plan.toml", {"kind": "nan", "times": 2, "count": 5})
    hit: list[str] = []
    for boot, nonce in enumerate(nonces(4)):
        hits = Hits(path)
        for ordinal in (0, 1, 2):
            rid = str(request(ordinal, nonce=nonce))
            if hits.choose(rid, f"boot{boot}"):
                hit.append(rid)
                assert hits.of(rid) is not None
            else:
                assert hits.of(rid) is None
    assert [RequestId.parse(rid).ordinal for rid in hit] == [0, 1, 2, 0, 1], "twice a sample, five in all"
    assert [(entry["request"], entry["boot"]) for entry in hits_of(path)] == [
        (rid, f"boot{number // 3}") for number, rid in enumerate(hit)
    ]
    assert all((entry["fault"], entry["kind"]) == (0, "nan") for entry in hits_of(path))


def test_a_request_is_chosen_once_and_ids_that_are_not_ours_never(tmp_path: Path) -> None:
    hits = Hits(write_plan(tmp_path / "plan.toml", {"kind": "nan", "times": 5}))
    rid = str(request(0))
    assert hits.choose(rid, BOOT) is not None
    assert hits.choose(rid, BOOT) is None
    assert hits.choose("HEALTH_CHECK_1", BOOT) is None
    assert len(hits_of(tmp_path / "plan.toml")) == 1


def test_without_a_plan_nothing_is_hit_or_written(tmp_path: Path) -> None:
    hits = Hits(None)
    assert hits.choose(str(request(0)), BOOT) is None
    assert list(tmp_path.iterdir()) == []


def test_a_hit_that_was_cut_by_a_crash_did_not_happen(tmp_path: Path) -> None:
    path = write_plan(tmp_path / "plan.toml", {"kind": "nan", "times": 2})
    log = tmp_path / "plan.toml.jsonl"
    assert Hits(path).choose(str(request(0)), BOOT) is not None
    with log.open("ab") as file:
        file.write(log.read_bytes()[:-20])
    hits = Hits(path)
    assert hits.choose(str(request(0, nonce="bbbbbbbb")), BOOT) is not None
    assert [entry["request"] for entry in hits_of(path)] == [
        str(request(0)),
        str(request(0, nonce="bbbbbbbb")),
    ]
    assert Hits(path).choose(str(request(0, nonce="cccccccc")), BOOT) is None


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{}", "line 1 is no hit"),
        ("[]", "line 1 is no hit"),
        ("nonsense", "line 1 is no hit"),
        ('{"fault": 0, "kind": "nan", "request": "x", "boot": "b"}', "line 1 is no hit"),
        ('{"fault": "0", "kind": "nan", "request": "hr-run-0-aaaaaaaa-1-0000000000000000"}', "line 1 is no hit"),
        ('{"fault": 0, "kind": "torn", "request": "hr-run-0-aaaaaaaa-1-0000000000000000"}', "another plan"),
        ('{"fault": 1, "kind": "nan", "request": "hr-run-0-aaaaaaaa-1-0000000000000000"}', "another plan"),
    ],
)
def test_hits_of_another_plan_or_none_are_refused(tmp_path: Path, line: str, message: str) -> None:
    path = write_plan(tmp_path / "plan.toml", {"kind": "nan"})
    (tmp_path / "plan.toml.jsonl").write_text(f"{line}\n")
    with pytest.raises(UsageError, match=message) as raised:
        Hits(path)
    assert "remove the file" in str(raised.value)

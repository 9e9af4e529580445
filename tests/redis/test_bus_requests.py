from __future__ import annotations

import re
from concurrent.futures import ThreadPoolExecutor
from importlib.resources import files
from typing import Any

import pytest

from headrace.bus import Bus, keys
from headrace.ids import RequestId
from tests.support.bus_values import (
    BOOT,
    IDENTITY,
    LONG,
    RUN,
    SITE,
    capture,
    claim,
    lapse,
    make_attempt,
    make_line,
    make_site,
    start_run,
    state_of,
)

pytestmark = pytest.mark.redis


@pytest.fixture
def bus(bus: Bus) -> Bus:
    """The bus with leases that lapse only when a test says so."""
    return Bus(bus.redis, leases=LONG)


def test_a_sample_goes_through_its_life(bus: Bus) -> None:
    start_run(bus, total=1, fed=1)
    (request,) = claim(bus, make_attempt(0))
    assert bus.requests.renew(RUN, [str(request)]) == []
    bus.requests.answered(RUN, str(request))
    assert capture(bus, request) == 1
    assert bus.sites.load(make_site()).requests == 0
    assert bus.requests.hold(SITE, [str(request)], [str(request)]) == []
    assert bus.requests.begin_store(request, 1, SITE) == "go"
    assert bus.requests.stored(request, SITE, 77) == "stored"
    view = bus.runs.get(RUN)
    assert view is not None
    assert (view.state, view.stored, view.tokens, view.bytes, view.open) == ("finished", 1, 3, 77, 0)
    assert view.identity == IDENTITY


def test_leases_are_as_long_as_they_say(bus: Bus) -> None:
    start_run(bus)
    one, two = claim(bus, make_attempt(0), make_attempt(1))
    seconds, micro = bus.redis.time()
    now = seconds + micro / 1e6

    def ends(key: str, request: RequestId) -> float:
        till = bus.redis.zscore(key, str(request))
        assert till is not None
        return till / 1000 - now

    leases = bus.requests.leases
    assert abs(ends(keys.in_flight(RUN), one) - leases.in_flight) < 60
    bus.requests.answered(RUN, str(one))
    assert abs(ends(keys.in_flight(RUN), one) - leases.grace) < 60
    capture(bus, two)
    assert abs(ends(keys.captured(SITE), two) - leases.captured) < 60
    assert abs(ends(keys.storing(SITE), two) - leases.storing) < 60


def test_a_claim_keeps_within_each_cap_of_the_site(bus: Bus) -> None:
    start_run(bus, sites=[make_site(max_requests=2, max_tokens=100, dump_cap_bytes=10_000)])
    attempts = [make_attempt(ordinal) for ordinal in range(3)]
    assert bus.requests.claim(RUN, SITE, BOOT, attempts) == ["claimed", "claimed", "full"]

    bus.sites.register(make_site("siteb", max_requests=9, max_tokens=5), ttl=3600)
    attempts = [make_attempt(ordinal, "bbbbbbbb") for ordinal in (2, 3)]
    assert bus.requests.claim(RUN, "siteb", BOOT, attempts) == ["claimed", "full"]

    bus.sites.register(make_site("sitec", dump_bytes=650), ttl=3600)
    attempts = [make_attempt(ordinal, "cccccccc") for ordinal in (3, 4)]
    assert bus.requests.claim(RUN, "sitec", BOOT, attempts) == ["claimed", "full"]


def test_a_small_attempt_is_claimed_past_one_that_does_not_fit(bus: Bus) -> None:
    start_run(bus)
    attempts = [make_attempt(0, tokens=20), make_attempt(1, tokens=2)]
    assert bus.requests.claim(RUN, SITE, BOOT, attempts) == ["full", "claimed"]
    assert bus.runs.pending(RUN, 10) == [0, 2, 3, 4]


def test_claims_of_many_dispatchers_never_pass_a_cap_or_give_a_sample_twice(bus: Bus) -> None:
    start_run(bus, total=40, fed=40, sites=[make_site(max_requests=20, max_tokens=45, dump_cap_bytes=10_000)])

    def dispatch(number: int) -> list[int]:
        attempts = [make_attempt(ordinal, f"{number:08d}") for ordinal in range(40)]
        answers = bus.requests.claim(RUN, SITE, BOOT, attempts)
        return [a.ordinal for a, answer in zip(attempts, answers, strict=True) if answer == "claimed"]

    with ThreadPoolExecutor(8) as pool:
        claimed = [ordinal for part in pool.map(dispatch, range(8)) for ordinal in part]
    assert len(claimed) == len(set(claimed)) == 15
    assert bus.sites.load(make_site()).tokens == 45


def test_a_claim_says_why_nothing_was_claimed(bus: Bus) -> None:
    attempt = make_attempt(0)
    assert bus.requests.claim(RUN, SITE, BOOT, [attempt]) == ["gone"]
    start_run(bus)
    assert bus.requests.claim(RUN, SITE, "boot2", [attempt]) == ["gone"]
    assert bus.requests.claim(RUN, "nosite", BOOT, [attempt]) == ["gone"]
    assert bus.requests.claim(RUN, SITE, BOOT, [make_attempt(99)]) == ["taken"]
    bus.runs.pause(RUN, "why")
    assert bus.requests.claim(RUN, SITE, BOOT, [attempt, attempt]) == ["paused", "paused"]
    assert bus.requests.claim(RUN, SITE, BOOT, []) == []


def test_a_claim_that_is_sent_again_after_its_attempt_ended_is_not_granted(bus: Bus) -> None:
    """A time-out longer than the lease: the same id a second time would never end again."""
    start_run(bus)
    attempt = make_attempt(0)
    (request,) = claim(bus, attempt)
    assert bus.requests.end(request, burn=False, kind="error", reason="connection") == "pending"
    assert bus.requests.claim(RUN, SITE, BOOT, [attempt]) == ["taken"]
    assert state_of(bus, 0)[0] == "pending"
    assert bus.requests.claim(RUN, SITE, BOOT, [make_attempt(0, "bbbbbbbb")]) == ["claimed"]


def test_a_failure_that_may_be_the_engines_burns_only_of_a_request_that_had_it_to_itself(bus: Bus) -> None:
    start_run(bus, sites=[make_site(), make_site("siteb")])

    def burns(request: RequestId) -> bool:
        before = len(bus.runs.dead(RUN))
        for _ in range(2):
            assert bus.requests.end(request, burn="if_alone", kind="error", reason="http_500") == "pending"
        return len(bus.runs.dead(RUN)) > before

    (older,) = claim(bus, make_attempt(0))
    claim(bus, make_attempt(1), site="siteb")
    (younger,) = claim(bus, make_attempt(2))
    (third,) = claim(bus, make_attempt(3))
    for request in (older, younger, third):
        assert not burns(request), "also the last one, though the others have ended"
    (alone,) = claim(bus, make_attempt(0, "bbbbbbbb"))
    bus.requests.renew(RUN, [str(alone)])
    assert burns(alone)

    (answered,) = claim(bus, make_attempt(0, "cccccccc"))
    bus.requests.answered(RUN, str(answered))
    (beside,) = claim(bus, make_attempt(2, "bbbbbbbb"))
    bus.requests.stored(answered, SITE, 1)
    assert not burns(beside), "the engine had not computed it yet for all that anybody knew"


def test_each_fifth_of_the_answers_that_cost_a_sample_nothing_costs_an_attempt(bus: Bus) -> None:
    start_run(bus, max_attempts=2)

    def fail(ordinal: int, number: int, reason: str, *, burn: bool = False) -> str:
        (request,) = claim(bus, make_attempt(ordinal, f"{number:08d}"))
        how: Any = {"burn": burn, "kind": "error", "reason": reason, "counted": reason == "http_503"}
        outcome = bus.requests.end(request, **how)
        assert bus.requests.end(request, **how) == outcome
        return outcome

    for number in range(4):
        assert [fail(ordinal, number, "http_503") for ordinal in (0, 1)] == ["pending"] * 2
        assert fail(2, number, "connection") == "pending"
    assert bus.runs.dead(RUN) == []
    assert fail(2, 4, "connection") == "pending", "not counted"
    assert fail(0, 4, "http_503") == "pending"
    assert [(RequestId.parse(name).ordinal, attempt) for name, attempt, _ in bus.runs.dead(RUN)] == [(0, 1)]
    assert fail(1, 4, "timeout", burn=True) == "pending", "one that burns by itself is not counted"
    assert bus.redis.hgetall(keys.spared(RUN)) == {b"1": b"4"}
    assert [fail(0, number, "http_503") for number in range(5, 10)] == ["pending"] * 4 + ["failed"]
    assert fail(1, 5, "http_503") == "failed"
    assert fail(3, 0, "http_503") == "pending"
    (request,) = claim(bus, make_attempt(3, "00000001"))
    capture(bus, request)
    bus.requests.stored(request, SITE, 1)
    assert not bus.redis.exists(keys.spared(RUN)), "emptied as samples end"


@pytest.mark.parametrize("renewed", [True, False])
def test_a_request_whose_credit_lapsed_was_not_alone_for_all_that_is_known(bus: Bus, renewed: bool) -> None:
    start_run(bus)
    (lapsed,) = claim(bus, make_attempt(0))
    bus.redis.hset(keys.credits(SITE), str(lapsed), "3 300 1")
    bus.requests.reap_site(SITE)
    (other,) = claim(bus, make_attempt(1))
    if renewed:
        bus.requests.renew(RUN, [str(lapsed)])
    for request in (lapsed, other)[: 1 + renewed]:
        assert bus.requests.end(request, burn="if_alone", kind="error", reason="http_500") == "pending"
    assert bus.runs.dead(RUN) == []


def test_a_lapsed_attempt_is_ended_by_the_reaper_and_says_whether_the_engine_had_answered(bus: Bus) -> None:
    start_run(bus)
    silent, answered = claim(bus, make_attempt(0), make_attempt(1))
    bus.requests.answered(RUN, str(answered))
    for request in (silent, answered):
        lapse(bus, keys.in_flight(RUN), str(request))
    ended, _ = bus.requests.reap_run(RUN)
    assert {(entry.request, entry.outcome, entry.reason) for entry in ended} == {
        (str(silent), "pending", "lapsed"),
        (str(answered), "pending", "no_dump"),
    }
    assert bus.requests.renew(RUN, [str(silent), str(answered)]) == [str(silent), str(answered)]
    assert bus.sites.load(make_site()).requests == 0


def test_the_last_attempt_fails_the_sample_until_its_line_is_written(bus: Bus) -> None:
    start_run(bus, total=1, fed=1, max_attempts=2)
    for nonce, outcome in (("aaaaaaaa", "pending"), ("bbbbbbbb", "failed")):
        (request,) = claim(bus, make_attempt(0, nonce))
        assert bus.requests.end(request, burn=True, kind="error", reason="timeout") == outcome
    assert bus.runs.dead(RUN) == [(str(request), 2, "timeout"), (str(request).replace("b" * 8, "a" * 8), 1, "timeout")]
    _, records = bus.requests.reap_run(RUN)
    assert [(r.ordinal, r.status, r.reason, r.request) for r in records] == [(0, "failed", "timeout", str(request))]
    assert bus.requests.reap_run(RUN) == ([], [])
    lapse(bus, keys.recording(RUN), "0")
    assert bus.requests.reap_run(RUN)[1] == records
    assert bus.runs.mark_done(RUN, [make_line(0, "failed", "timeout")]) == 1
    view = bus.runs.get(RUN)
    assert view is not None
    assert (view.state, view.failed, view.failed_by) == ("finished", 1, {"timeout": 1})


def test_attempts_that_do_not_count_never_fail_a_sample(bus: Bus) -> None:
    start_run(bus, max_attempts=1)
    for number in range(5):
        (request,) = claim(bus, make_attempt(0, f"{number:08d}"))
        assert bus.requests.end(request, burn=False, kind="loss", reason="no_room") == "pending"
    assert bus.runs.dead(RUN) == []


def test_a_thousand_leases_are_renewed_in_one_call(bus: Bus) -> None:
    start_run(bus, total=1000, fed=1000, sites=[make_site(max_requests=2000, max_tokens=9999, dump_cap_bytes=1 << 30)])
    attempts = [make_attempt(ordinal) for ordinal in range(1000)]
    assert set(bus.requests.claim(RUN, SITE, BOOT, attempts)) == {"claimed"}
    names = [attempt.request for attempt in attempts]
    assert bus.requests.renew(RUN, names) == []
    bus.redis.delete(keys.in_flight(RUN))
    assert bus.requests.renew(RUN, names) == names
    assert bus.requests.renew(RUN, []) == []


def test_the_reaper_takes_many_lapsed_attempts_in_several_passes(bus: Bus) -> None:
    start_run(bus, total=450, fed=450, sites=[make_site(max_requests=500, max_tokens=9999, dump_cap_bytes=1 << 30)])
    attempts = [make_attempt(ordinal) for ordinal in range(450)]
    bus.requests.claim(RUN, SITE, BOOT, attempts)
    bus.redis.zadd(keys.in_flight(RUN), {attempt.request: 1 for attempt in attempts})
    found = [len(bus.requests.reap_run(RUN)[0]) for _ in range(4)]
    assert found == [200, 200, 50, 0]
    assert sorted(bus.runs.pending(RUN, 1000)) == list(range(450))


def test_scripts_survive_a_server_that_lost_them(bus: Bus) -> None:
    start_run(bus)
    for step in (
        lambda: claim(bus, make_attempt(0)),
        lambda: bus.requests.renew(RUN, ["x"]),
        lambda: bus.requests.reap_run(RUN),
    ):
        bus.redis.script_flush()
        step()
    assert bus.sites.load(make_site()).requests == 1


# Every command that the scripts use, all of them in Redis 6.2 in the forms used: https://redis.io/docs/latest/commands/
OF_REDIS_6_2 = {
    *("DEL", "EXISTS", "PERSIST", "PEXPIRE", "TIME"),
    *("BITPOS", "GETBIT", "SETBIT"),
    *("HDEL", "HEXISTS", "HGET", "HGETALL", "HINCRBY", "HKEYS", "HLEN", "HMGET", "HSET", "HSETNX", "HVALS"),
    *("LLEN", "LREM", "RPUSH"),
    *("SADD", "SMEMBERS", "SREM"),
    *("XADD",),
    *("ZADD", "ZCARD", "ZRANGEBYSCORE", "ZREM", "ZSCORE"),
}


def test_the_scripts_use_commands_of_redis_6_2_only() -> None:
    for script in (files("headrace.bus") / "lua").iterdir():
        text = script.read_text()
        used = set(re.findall(r"redis\.p?call\('([A-Z]+)'", text))
        assert used <= OF_REDIS_6_2, (script.name, used - OF_REDIS_6_2)
        assert len(re.findall(r"redis\.p?call\(", text)) == len(re.findall(r"redis\.p?call\('[A-Z]+'", text))
        assert not re.search(r"PEXPIRE'[^)]*'(NX|XX|GT|LT)'", text), "options of Redis 7"
        assert "#!lua" not in text, "a shebang is of Redis 7"
        assert not re.search(r"redis\.(setresp|acl_check_cmd|REDIS_VERSION)", text)

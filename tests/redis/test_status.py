"""`headrace status`, for people and as JSON."""

from __future__ import annotations

import json

import pytest

from headrace.bus import Bus, keys
from headrace.ids import RequestId
from headrace_cli.status import Report
from tests.support.bus_values import (
    IDENTITY,
    RUN,
    capture,
    claim,
    make_attempt,
    make_line,
    make_spec,
    start_run,
)
from tests.support.commands import assert_one_line, headrace

pytestmark = pytest.mark.redis

PAUSED = {
    "run": RUN,
    "state": "paused",
    "reason": "a [reason]\x1b[31m",
    "waiting_for": "an engine",
    "total": 5,
    "stored": 1,
    "rejected": 1,
    "failed": 1,
    "open": 2,
    "pending": 1,
    "in_flight": 0,
    "tokens": 5,
    "bytes": 7,
    "verdicts": 2,
    "mismatches": 1,
    "mismatch_rate": 0.5,
    "reasons": {"token_content": 1},
    "rejected_by": {"too_long": 1},
    "failed_by": {"token_content": 1},
    "rate": None,
    "created_at": "",
    "finished_at": None,
    "output": "/data/out",
    "boundaries": [2, 4, 6],
    "final_state": "pre_norm",
    "format": "headrace",
    "engine": IDENTITY.engine,
    "weight_version": IDENTITY.weight_version,
    "dead": [],
}
KEYS = list(PAUSED)


def fail(bus: Bus, ordinal: int, reason: str) -> RequestId:
    (request,) = claim(bus, make_attempt(ordinal))
    bus.requests.end(request, burn=True, kind="mismatch", reason=reason)
    return request


def test_a_run_is_one_json_object_with_keys_that_stay(bus: Bus, redis_url: str) -> None:
    start_run(bus, max_attempts=1)
    request = fail(bus, 3, "token_content")
    (proven,) = claim(bus, make_attempt(2))
    capture(bus, proven)
    bus.runs.mark_done(
        RUN, [make_line(0), make_line(3, "failed", "token_content", str(request)), make_line(4, "rejected", "too_long")]
    )
    bus.runs.pause(RUN, "a [reason]\x1b[31m")
    bus.runs.say_waiting(RUN, "an engine")
    shown = headrace("status", RUN, "--json", HEADRACE_REDIS_URL=redis_url, COLUMNS="20")
    assert (shown.returncode, shown.stderr, shown.stdout.count("\n")) == (0, "", 1)
    table = json.loads(shown.stdout)
    letter = {"request": str(request), "ordinal": 3, "attempt": 1, "reason": "token_content"}
    assert list(table) == KEYS
    assert table == PAUSED | {"created_at": table["created_at"], "dead": [letter]}


def test_the_rate_is_that_since_the_older_note_by_the_clock_of_redis(bus: Bus) -> None:
    start_run(bus)
    bus.runs.mark_rate(RUN)
    bus.runs.mark_done(RUN, [make_line(0), make_line(1)])
    view = bus.runs.get(RUN)
    assert view is not None
    table = Report(view=view, dead=[], now=view.rate_since + 4).to_json()
    assert table["rate"] == {"rows_per_second": 0.5, "tokens_per_second": 2.5, "seconds_left": 6.0}
    assert (table["engine"], table["mismatch_rate"]) == (None, 0.0)
    assert Report(view=view, dead=[], now=view.rate_since).to_json()["rate"] is None


def test_all_runs_are_a_list_also_when_there_is_none(bus: Bus, redis_url: str) -> None:
    assert headrace("status", "--json", HEADRACE_REDIS_URL=redis_url).stdout == "[]\n"
    start_run(bus)
    bus.runs.create(make_spec(run="newer"))
    bus.redis.hset(keys.run("newer"), "spec", make_spec(run="newer", schema=9).encode())
    shown = headrace("status", "--json", HEADRACE_REDIS_URL=redis_url)
    assert_one_line(shown, 1, "run 'newer'", "upgrade headrace")
    assert [table["run"] for table in json.loads(shown.stdout)] == [RUN]


def test_json_while_waiting_leaves_stdout_to_the_json(bus: Bus, redis_url: str) -> None:
    start_run(bus)
    bus.runs.mark_done(RUN, [make_line(ordinal) for ordinal in range(5)])
    shown = headrace("status", RUN, "--wait", "--json", HEADRACE_REDIS_URL=redis_url)
    assert shown.returncode == 0
    table = json.loads(shown.stdout)
    assert (table["state"], table["open"]) == ("finished", 0)
    assert table["created_at"] <= table["finished_at"]


def test_the_last_burnt_attempts_are_shown_also_when_no_sample_failed(bus: Bus, redis_url: str) -> None:
    start_run(bus, total=7, fed=7)
    assert "burnt attempts" not in headrace("status", RUN, HEADRACE_REDIS_URL=redis_url).stdout
    requests = [fail(bus, ordinal, f"why{ordinal}") for ordinal in range(7)]
    shown = headrace("status", RUN, HEADRACE_REDIS_URL=redis_url, COLUMNS="200").stdout
    assert "last burnt attempts" in shown
    for ordinal, request in enumerate(requests):
        assert (f"why{ordinal}: attempt 1, {request}" in shown) == (ordinal >= 2)


@pytest.mark.parametrize(
    ("arguments", "read"),
    [
        (("list",), False),
        (("status",), False),
        (("pause", RUN), False),
        (("resume", RUN), False),
        (("cancel", RUN), False),
        (("status", RUN), True),
        (("status", "--json"), True),
    ],
)
def test_burnt_attempts_are_read_only_where_they_are_shown(
    bus: Bus, redis_url: str, arguments: tuple[str, ...], read: bool
) -> None:
    start_run(bus)
    bus.redis.config_resetstat()
    assert headrace(*arguments, HEADRACE_REDIS_URL=redis_url).returncode == 0
    assert ("cmdstat_xrevrange" in bus.redis.info("commandstats")) == read


def test_how_long_a_run_took_is_that_of_its_last_start(bus: Bus, redis_url: str) -> None:
    start_run(bus)
    bus.redis.hincrby(keys.run(RUN), "created_at", -7_200_000)
    bus.runs.mark_done(RUN, [make_line(0, "failed", "nan"), *(make_line(ordinal) for ordinal in range(1, 5))])
    assert "finished in 2h 00m" in headrace("status", RUN, HEADRACE_REDIS_URL=redis_url).stdout
    assert bus.runs.reopen(RUN, [0]) == {0: "nan"}
    bus.redis.hincrby(keys.run(RUN), "reopened_at", -600_000)
    bus.runs.mark_done(RUN, [make_line(0)])
    shown = headrace("status", RUN, HEADRACE_REDIS_URL=redis_url).stdout
    assert "failed samples tried again in 10m 00s" in shown
    assert "finished in" not in shown


@pytest.mark.parametrize("options", [("--wait",), (RUN, "--wait", "--watch")])
def test_options_that_do_not_go_together_are_refused(bus: Bus, redis_url: str, options: tuple[str, ...]) -> None:
    start_run(bus)
    assert_one_line(headrace("status", *options, HEADRACE_REDIS_URL=redis_url), 2, "--wait")


@pytest.mark.parametrize("options", [(), ("--watch", "--json")])
def test_a_run_that_redis_does_not_know_is_a_usage_error(bus: Bus, redis_url: str, options: tuple[str, ...]) -> None:
    start_run(bus)
    shown = headrace("status", "other", *options, HEADRACE_REDIS_URL=redis_url)
    assert_one_line(shown, 2, "'other'", RUN)
    assert shown.stdout == ""

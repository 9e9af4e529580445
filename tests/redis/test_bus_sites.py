from __future__ import annotations

from dataclasses import replace

import pytest

from headrace.bus import Bus, keys
from headrace.bus.values import Unregistered
from headrace.errors import Unreadable
from headrace.flow import Load
from tests.support.bus_values import (
    IDENTITY,
    RUN,
    SITE,
    capture,
    claim,
    make_attempt,
    make_site,
    make_spec,
    start_run,
)
from tests.support.waiting import wait_until

pytestmark = pytest.mark.redis


def test_a_site_comes_back_as_it_was_registered(bus: Bus) -> None:
    site = make_site(url="http://[::1]:30000", model="ü/m", boundaries=(1, 2, 3), dump_bytes=17)
    bus.sites.register(site, ttl=3600)
    assert bus.sites.get(SITE) == site
    assert bus.sites.names() == [SITE]
    assert bus.sites.registered() == [site]
    assert 0 < bus.redis.pttl(keys.site(SITE)) <= 3_600_000


def test_a_registration_lapses_by_itself_and_stays_known_until_it_is_evicted(bus: Bus) -> None:
    bus.sites.register(make_site(), ttl=0.05)
    wait_until(lambda: bus.sites.get(SITE) is None, 5, "the registration to lapse")
    assert bus.sites.names() == [SITE]
    assert bus.sites.registered() == []
    assert bus.sites.evict(SITE)
    assert bus.sites.names() == []
    assert not bus.sites.evict(SITE)


def test_a_registration_is_replaced_whole(bus: Bus) -> None:
    bus.sites.register(make_site(), ttl=3600)
    bus.redis.hset(keys.site(SITE), "stale", "1")
    bus.sites.register(make_site(boot="boot2"), ttl=3600)
    assert bus.redis.hget(keys.site(SITE), "stale") is None


def test_a_registration_of_the_first_version_publishes_no_final_norm(bus: Bus) -> None:
    bus.sites.register(make_site(), ttl=3600)
    bus.redis.hdel(keys.site(SITE), "final_norm")
    assert bus.sites.registered() == [make_site(final_norm=False)]


def test_why_a_site_is_not_registered_is_known_for_a_while_and_until_it_is(bus: Bus) -> None:
    entry = Unregistered(site=SITE, url="http://127.0.0.1:30000", why="ü: the canary failed")
    bus.sites.explain(entry, ttl=3600)
    bus.sites.explain(replace(entry, site="another"), ttl=0.05)
    wait_until(lambda: bus.sites.unregistered() == [entry], 5, "the other reason to lapse")
    assert bus.sites.names() == [], "to be known is to have been registered"
    bus.sites.register(make_site(), ttl=3600)
    assert bus.sites.unregistered() == []
    bus.sites.explain(entry, ttl=3600)
    bus.sites.unregister(SITE)
    assert bus.sites.unregistered() == []


def test_a_reason_of_another_version_is_passed_over(bus: Bus) -> None:
    entry = Unregistered(site=SITE, url="http://127.0.0.1:30000", why="no card")
    bus.sites.explain(entry, ttl=3600)
    for number, value in enumerate((b"{}", b"[]", b"not JSON", b'{"site": "a", "url": "b", "why": "c", "more": 1}')):
        bus.redis.set(keys.unregistered(f"other{number}"), value)
    assert bus.sites.unregistered() == [entry]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("fingerprint", None),
        ("max_tokens", "many"),
        ("boundaries", "7"),
        ("boundaries", "["),
        ("url", b"\xff"),
        ("dtype", "I8"),
        ("dump_cap_bytes", "0"),
    ],
)
def test_a_registration_of_another_version_takes_nothing_and_the_others_go_on(
    bus: Bus, field: str, value: str | bytes | None
) -> None:
    bus.sites.register(make_site(), ttl=3600)
    bus.sites.register(make_site("other"), ttl=3600)
    if value is None:
        bus.redis.hdel(keys.site(SITE), field)
    else:
        bus.redis.hset(keys.site(SITE), field, value)
    assert bus.sites.registered() == [make_site("other")]
    with pytest.raises(Unreadable, match=f"{SITE} cannot be read .* upgrade both"):
        bus.sites.get(SITE)


def test_an_unregistered_site_takes_nothing_but_what_was_captured_there_is_stored(bus: Bus) -> None:
    start_run(bus)
    (request,) = claim(bus, make_attempt(0))
    capture(bus, request)
    bus.sites.unregister(SITE)
    assert bus.requests.claim(RUN, SITE, "boot1", [make_attempt(1)]) == ["gone"]
    assert not bus.sites.evict(SITE)
    assert bus.requests.begin_store(request, 1, SITE) == "go"
    assert bus.requests.stored(request, SITE, 7) == "stored"
    assert bus.sites.evict(SITE)


def test_a_site_with_a_request_in_flight_is_not_evicted(bus: Bus) -> None:
    """Its watcher may be back in a moment, and the engine still works on the request."""
    start_run(bus)
    (request,) = claim(bus, make_attempt(0))
    bus.sites.unregister(SITE)
    assert not bus.sites.evict(SITE)
    bus.sites.register(make_site(), ttl=3600)
    assert bus.sites.load(make_site()).requests == 1
    bus.sites.unregister(SITE)
    bus.requests.end(request, burn=False, kind="error", reason="connection")
    assert bus.sites.evict(SITE)
    assert bus.redis.keys("hr:site:*") == []


def test_credits_that_nobody_renews_are_dropped(bus: Bus) -> None:
    start_run(bus)
    (request,) = claim(bus, make_attempt(0))
    assert bus.sites.load(make_site(dump_bytes=5)) == Load(requests=1, tokens=3, promised_bytes=300, measured_bytes=5)
    bus.redis.hset(keys.credits(SITE), str(request), "3 300 1")
    bus.requests.reap_site(SITE)
    assert bus.sites.load(make_site()).requests == 0
    assert bus.requests.renew(RUN, [str(request)]) == []
    assert bus.sites.load(make_site()).requests == 1, "its lease had not lapsed"


def test_a_site_says_why_it_does_not_fit_a_run() -> None:
    spec, site = make_spec(), make_site()
    assert site.unfit_for(spec, None) == site.unfit_for(spec, IDENTITY) == ""
    for change in ({"model": "n"}, {"boundaries": (1, 2)}, {"final_state": "post_norm"}, {"hidden_size": 9}):
        problem = replace(site, **change).unfit_for(spec, IDENTITY)
        assert next(iter(change)).replace("_", " ") in problem
        assert "the run needs" in problem
    for change, old in (({"fingerprint": "engine 2"}, "engine 1"), ({"weight_version": "w2"}, "w1")):
        problem = replace(site, **change).unfit_for(spec, IDENTITY)
        assert all(word in problem for word in (*change.values(), old, "bring the engine back", "start another run"))
        assert replace(site, **change).unfit_for(spec, None) == ""
    assert site.caps.dump_bytes == 1000
    assert site.bytes_per_token == 4 * 8 * 2 + 8


def test_a_site_without_a_final_norm_does_not_fit_a_run_that_is_made_with_it() -> None:
    bare = make_site(final_norm=False)
    assert bare.unfit_for(make_spec(), None) == ""
    assert make_site().unfit_for(make_spec(format="specforge"), None) == ""
    problem = bare.unfit_for(make_spec(format="specforge"), None)
    assert problem.startswith("publishes no final norm, which format 'specforge' needs with 'pre_norm'")
    assert "capture 'post_norm' instead" in problem
    spec = make_spec(format="specforge", final_state="post_norm")
    assert replace(bare, final_state="post_norm").unfit_for(spec, None) == ""
    assert bare.unfit_for(make_spec(format="of a later version"), None) == ""


def test_a_registration_says_whether_a_final_norm_is_published(bus: Bus) -> None:
    for final_norm in (True, False):
        site = make_site(final_norm=final_norm)
        bus.sites.register(site, ttl=60)
        assert bus.sites.get(site.site) == site


def test_what_a_site_stores_is_counted(bus: Bus) -> None:
    start_run(bus)
    (request,) = claim(bus, make_attempt(0))
    assert bus.sites.storing(SITE) == (0, 0)
    capture(bus, request)
    assert bus.sites.storing(SITE) == (1, 0)


def test_dispatchers_that_live_are_counted_and_dead_ones_are_not(bus: Bus) -> None:
    assert bus.dispatchers.alive() == 0
    for name in ("one", "two"):
        bus.dispatchers.beat(name, ttl=3600)
    bus.dispatchers.beat("dead", ttl=0.05)
    wait_until(lambda: bus.dispatchers.alive() == 2, what="the dead one's sign of life to lapse")
    assert 0 < bus.redis.pttl(keys.dispatcher("one")) <= 3_600_000
    bus.dispatchers.leave("one")
    assert bus.dispatchers.alive() == 1

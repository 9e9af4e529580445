"""What `headrace doctor` says about the dispatchers."""

from __future__ import annotations

import pytest

from headrace.bus import Bus, keys
from headrace.settings import Settings
from headrace_cli.doctor import examine
from tests.support.bus_values import SITE, make_site

pytestmark = pytest.mark.redis


def test_dispatchers_that_live_are_counted_and_none_is_a_finding(bus: Bus, redis_url: str) -> None:
    settings = Settings(redis_url=redis_url)
    (finding,) = [finding for finding in examine(settings) if "dispatchers" in finding.what]
    assert (finding.what, finding.ok) == ("dispatchers alive: 0", False)
    assert "headrace-dispatcher" in finding.fix
    bus.dispatchers.beat("one", ttl=3600)
    bus.dispatchers.beat("two", ttl=3600)
    (finding,) = [finding for finding in examine(settings) if "dispatchers" in finding.what]
    assert (finding.what, finding.ok) == ("dispatchers alive: 2", True)


def test_a_registration_that_cannot_be_read_is_a_finding_that_says_why(bus: Bus, redis_url: str) -> None:
    bus.sites.register(make_site(), ttl=3600)
    bus.redis.hdel(keys.site(SITE), "fingerprint")
    (finding,) = [finding for finding in examine(Settings(redis_url=redis_url)) if SITE in finding.what]
    assert (finding.what, finding.ok) == (f"site {SITE} takes no requests", False)
    assert "fingerprint" in finding.fix
    assert "upgrade" in finding.fix

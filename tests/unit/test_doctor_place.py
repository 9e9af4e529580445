from __future__ import annotations

from dataclasses import dataclass

import pytest

from headrace_cli.doctor.place import at_url

ADDRESSES = {
    "localhost": frozenset({"127.0.0.1", "::1"}),
    "127.0.0.1": frozenset({"127.0.0.1"}),
    "engine": frozenset({"10.0.0.7"}),
    "10.0.0.7": frozenset({"10.0.0.7"}),
    "10.0.0.8": frozenset({"10.0.0.8"}),
}


@dataclass(frozen=True)
class Place:
    url: str


def find(url: str, *known: str) -> list[str]:
    found = at_url(map(Place, known), url, lambda host: ADDRESSES.get(host, frozenset()))
    return [place.url for place in found]


@pytest.mark.parametrize(
    ("url", "known"),
    [
        ("http://engine:30000", "http://engine:30000"),
        ("http://engine:30000/", "http://engine:30000"),
        ("http://ENGINE:30000", "http://engine:30000"),
        ("http://engine", "http://engine:80"),
        ("http://localhost:30000", "http://127.0.0.1:30000"),
        ("http://engine:30000/a/", "http://10.0.0.7:30000/a"),
        ("http://unknown:1", "http://unknown:1"),
    ],
)
def test_an_engine_is_found_under_any_of_its_names(url: str, known: str) -> None:
    assert find(url, "http://10.0.0.8:30000", known) == [known]


@pytest.mark.parametrize(
    "url", ["http://engine:30001", "http://10.0.0.8:30000", "http://unknown:30000", "http://engine:30000/other"]
)
def test_another_port_host_or_path_is_another_engine(url: str) -> None:
    assert find(url, "http://engine:30000", "http://unreachable:30000") == []


def test_the_very_address_counts_for_more_than_one_of_the_same_machine() -> None:
    known = ("http://localhost:30000", "http://127.0.0.1:30000")
    assert find("http://127.0.0.1:30000", *known) == ["http://127.0.0.1:30000"]


def test_the_system_knows_the_loopback() -> None:
    assert at_url([Place("http://127.0.0.1:9")], "http://localhost:9") == [Place("http://127.0.0.1:9")]
    assert at_url([Place("http://no-such-host.invalid:9")], "http://localhost:9") == []

"""What surrounds the trials of bench.strategies."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import pytest
import requests

from bench.options import result_file
from bench.strategies.__main__ import main
from bench.strategies.traffic import Traffic
from tests.support.http import StubServer
from tests.support.waiting import wait_until


class Server(StubServer):
    """Answers every request with one status."""

    def __init__(self, status: int) -> None:
        super().__init__()
        self.status = status
        self.paths: list[str] = []

    def answer(self, method: str, path: str, body: bytes) -> tuple[int, bytes]:
        self.paths.append(path)
        return self.status, b"{}"


def test_traffic_is_probes_and_chats() -> None:
    with Server(200) as server, Traffic(server.url, 1) as traffic:
        wait_until(lambda: traffic.probes and traffic.chats, what="a probe and a chat")
    assert set(server.paths) == {"/health_generate", "/generate"}


def test_traffic_that_was_not_answered_well_fails_at_the_end() -> None:
    with Server(500) as server, pytest.raises(requests.HTTPError, match="500"), Traffic(server.url, 1):
        wait_until(lambda: server.paths, what="a request")


def test_traffic_does_not_hide_what_else_went_wrong() -> None:
    with Server(500) as server, pytest.raises(KeyError), Traffic(server.url, 1):
        wait_until(lambda: server.paths, what="a request")
        raise KeyError


@pytest.mark.parametrize("name", ["none/results.json", "."])
def test_results_that_cannot_be_written_are_refused_before_anything_runs(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["bench.strategies", "--json", str(tmp_path / name)])
    with pytest.raises(SystemExit, match="2"):
        main()
    assert "cannot be written" in capsys.readouterr().err


def test_a_file_for_results_may_be_there(tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    assert result_file(str(path)) == path
    path.touch()
    assert result_file(str(path)) == path
    with pytest.raises(argparse.ArgumentTypeError):
        result_file(str(path / "below"))

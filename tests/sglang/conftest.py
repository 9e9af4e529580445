"""Fixtures of the tier that runs the real SGLang: environments, models, and one server at a time.

A test says which server it wants and gets it as `server`:

    pytestmark = pytest.mark.served(SMOL)  # or on a test

    def test_something(server: SglangServer) -> None: ...

Tests with equal configurations share a server and run one after another, whatever their files; before each test the
server is settled (nothing runs, empty cache, no dumps). A test that harms its server takes `servers.alone(SMOL)`.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.sglang import models
from tests.sglang.env import NEWEST, Environment, environment, install_headrace
from tests.sglang.server import ServerConfig, Servers, SglangServer

_TIMEOUT = 1500  # seconds: a server's start is part of its first test


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "served(config): runs on the server of this ServerConfig")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Bring a folder's tests of one server together, in the order in which the servers are first asked for."""
    order: dict[tuple[Path, ServerConfig | None], int] = {}
    places = {}
    here = [item for item in items if Path(__file__).parent in item.path.parents]
    for item in here:
        item.add_marker(pytest.mark.timeout(_TIMEOUT))
        places[item] = order.setdefault((item.path.parent, _config_of(item)), len(order))
    here.sort(key=places.__getitem__)
    items[:] = [item for item in items if item not in places] + here


def _config_of(item: pytest.Item) -> ServerConfig | None:
    marker = item.get_closest_marker("served")
    return None if marker is None else marker.args[0]


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> models.Checkpoints:
    """Checkpoints by the names of `tests.sglang.models.MODELS`, each made once."""
    return models.Checkpoints(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="session")
def servers(checkpoints: models.Checkpoints, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    """The session's servers; see `Servers`."""

    site = tmp_path_factory.mktemp("site")
    install_headrace(environment(NEWEST).python, site)

    def with_headrace(version: str) -> Environment:
        return environment(version).before(site)

    pool = Servers(environment=with_headrace, checkpoint=checkpoints.get, logs=tmp_path_factory.mktemp("sglang-logs"))
    yield pool
    pool.close()


@pytest.fixture
def server(request: pytest.FixtureRequest, servers: Servers) -> SglangServer:
    """The server of the test's `served` marker, running and settled."""
    config = _config_of(request.node)
    assert config is not None, "mark the test with pytest.mark.served(config)"
    return servers.get(config)

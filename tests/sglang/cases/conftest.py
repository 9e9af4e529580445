"""Servers with the provoking plugin beside headrace's, and a rig around the one that a test is served by."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest

from tests.sglang.cases.checking import Reference
from tests.sglang.cases.rig import Rig, install_provoking
from tests.sglang.models import Checkpoints
from tests.sglang.server import Servers, SglangServer


@pytest.fixture(scope="package")
def servers(servers: Servers, checkpoints: Checkpoints, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    """The tier's servers; SGLang finds the provoking plugin, and before headrace's."""
    folder = install_provoking(tmp_path_factory.mktemp("provoking"))
    servers.close()
    pool = Servers(
        environment=lambda version: servers.environment(version).before(folder),
        checkpoint=checkpoints.get,
        logs=servers.logs,
    )
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def reference() -> Callable[[Path, tuple[int, ...]], Reference]:
    """The reference of a checkpoint and boundaries, each made once."""
    return cache(Reference)


@pytest.fixture
def make_rig(
    request: pytest.FixtureRequest, reference: Callable[[Path, tuple[int, ...]], Reference]
) -> Callable[[SglangServer], Rig]:
    """Makes a rig around a server that runs; its prompts are of the test's own."""

    def make(server: SglangServer) -> Rig:
        return Rig(server, reference(server.model, server.card().boundaries), request.node.nodeid)

    return make


@pytest.fixture
def rig(server: SglangServer, make_rig: Callable[[SglangServer], Rig]) -> Iterator[Rig]:
    """A rig around the server of the test's marker; at the end nothing may be left in its folder."""
    made = make_rig(server)
    yield made
    made.assert_nothing_left()
    made.client.close()

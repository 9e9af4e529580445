"""One tiny model, its states, and a sound dataset of them, for every test of a verification."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.support.datasets import States, build, compute_states
from tests.support.tiny_models import tiny_llama


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="session")
def states(model: Path) -> States:
    return compute_states(model)


@pytest.fixture(scope="session")
def pristine(model: Path, states: States, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("pristine"), model, states)


@pytest.fixture
def dataset(pristine: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(pristine, tmp_path / "dataset"))

"""The tiny model, made once for all pipeline tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.tiny_models import tiny_llama


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama of 8 layers, width 64."""
    return tiny_llama(tmp_path_factory.mktemp("model") / "tiny")

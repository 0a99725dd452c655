"""Fixtures for tests of checkpoints."""

import shutil
from pathlib import Path

import pytest

import saves


@pytest.fixture(scope="session")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two checkpoints, which no test changes."""
    path = tmp_path_factory.mktemp("sound")
    saves.write(path, 1, 2)
    return path


@pytest.fixture
def folder(sound: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(sound, tmp_path / "checkpoints"))

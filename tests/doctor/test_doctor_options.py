"""The doctor's command line."""

from __future__ import annotations

from pathlib import Path

import pytest

from mpiddp.doctor.common.options import DoctorOptions, check_json, parse
from mpiddp.errors import ConfigurationError


def test_without_options():
    assert parse([]) == DoctorOptions(timeout=30.0, json=None, runs_dir=Path("runs"), data_dir=None)


def test_all_options():
    words = (
        "--json j --runs-dir r --data-dir d --timeout 5 --backend gloo --interface eth0 "
        "--allow-shared-gpu"
    )
    expected = DoctorOptions(
        backend="gloo",
        timeout=5.0,
        interface="eth0",
        allow_shared_gpu=True,
        json=Path("j"),
        runs_dir=Path("r"),
        data_dir=Path("d"),
    )
    assert parse(words.split()) == expected


@pytest.mark.parametrize("words", [["--wrong"], ["extra"], ["--timeout", "x"], ["--timeout", "-1"]])
def test_mistakes(words):
    with pytest.raises(ConfigurationError):
        parse(words)


def test_a_file_that_can_be_written(tmp_path):
    check_json(tmp_path / "new.json")
    for wrong in (tmp_path, tmp_path / "nowhere" / "new.json"):
        with pytest.raises(ConfigurationError, match="cannot be written"):
            check_json(wrong)

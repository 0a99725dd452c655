"""The doctor's command line."""

from __future__ import annotations

from pathlib import Path

import pytest

from mpiddp.doctor.examiner.doctor_options import FINDINGS, DoctorOptions, parse
from mpiddp.errors import ConfigurationError
from mpiddp.options.outputs import Output


def test_all_options():
    words = (
        "--output j.json --runs-dir r --data-dir d --timeout 5 --backend gloo --interface eth0 "
        "--allow-shared-gpu"
    )
    expected = DoctorOptions(
        backend="gloo",
        timeout=5.0,
        interface="eth0",
        allow_shared_gpu=True,
        output=(Output(Path("j.json"), FINDINGS),),
        runs_dir=Path("r"),
        data_dir=Path("d"),
    )
    assert parse(words.split()) == expected


@pytest.mark.parametrize("words", [["extra"], ["--timeout", "-1"]])
def test_mistakes(words):
    with pytest.raises(ConfigurationError):
        parse(words)

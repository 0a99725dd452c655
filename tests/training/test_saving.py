"""When a training makes checkpoints, and which of them is the best."""

from __future__ import annotations

import errno
import os
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
from test_metrics import ROW

from mpiddp.checkpoints.storage.finding import Found
from mpiddp.errors import StorageError
from mpiddp.training import saving, training_state
from mpiddp.training.options.config import Configuration
from mpiddp.training.saving import find_score, look_for_checkpoint


def test_the_best_has_the_highest_accuracy_or_else_the_lowest_loss() -> None:
    evaluated = replace(ROW, test_loss=0.5)
    assert find_score(ROW) is None
    assert find_score(replace(evaluated, test_metrics={"gap": 7.0, "accuracy": 0.75})) == 0.75
    for metrics in ({}, {"gap": 7.0}):
        better = replace(evaluated, test_loss=0.25, test_metrics=metrics)
        score, higher = find_score(replace(evaluated, test_metrics=metrics)), find_score(better)
        assert score is not None and higher is not None and higher > score


def test_a_position_that_cannot_be_read_ends_the_attempt_and_not_the_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_: Found) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    found = Found(tmp_path / "step-1", mock.Mock(configuration={}))
    session = mock.Mock(broadcast=lambda value: value)
    monkeypatch.setattr(training_state, "read_values", fail)
    monkeypatch.setattr(saving, "_choose", lambda *_: found)
    monkeypatch.setattr(saving, "check_fit", lambda *_: [])
    with pytest.raises(StorageError, match=r"step-1 cannot be read: rank 0 on .*error"):
        look_for_checkpoint(Configuration(runs_dir=tmp_path).resolve(), session)


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({"MPIDDP_JOB_DIRECTORY": "front", "TORCHELASTIC_RESTART_COUNT": "0"}, False),
        ({"MPIDDP_JOB_DIRECTORY": "front", "TORCHELASTIC_RESTART_COUNT": "1"}, True),
        ({"MPIDDP_JOB_DIRECTORY": "other", "TORCHELASTIC_RESTART_COUNT": "1"}, False),
        ({"SLURM_JOB_ID": "7", "SLURM_RESTART_COUNT": "1"}, True),
        ({"SLURM_JOB_ID": "8", "SLURM_RESTART_COUNT": "1"}, False),
        ({"SLURM_JOB_ID": "7", "TORCHELASTIC_RESTART_COUNT": "1"}, False),
    ],
)
def test_only_a_later_attempt_of_a_job_goes_on_from_its_checkpoints(
    variables: dict[str, str], expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("SLURM_RESTART_COUNT", "TORCHELASTIC_RESTART_COUNT", "SLURM_ARRAY_JOB_ID"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    found: Any = SimpleNamespace(manifest=SimpleNamespace(front="front", job="7"))
    assert saving._is_this_jobs(found) is expected

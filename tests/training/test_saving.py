"""When a training makes checkpoints, and which of them is the best."""

from __future__ import annotations

import errno
import os
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from test_metrics import ROW

from mpiddp.checkpoints.storage.finding import Found
from mpiddp.errors import StorageError
from mpiddp.launch.failure.failure import FailureHandler
from mpiddp.training import resuming, saving
from mpiddp.training.options.config import Configuration, parse
from mpiddp.training.options.groups.checkpoints import Interval
from mpiddp.training.resuming import look_for_checkpoint
from mpiddp.training.run_state import EpochSums, Position
from mpiddp.training.saving import find_score
from mpiddp.training.trainer import train


def test_the_best_has_the_highest_accuracy_or_else_the_lowest_loss() -> None:
    evaluated = replace(ROW, test_loss=0.5)
    assert find_score(ROW) is None
    assert find_score(replace(evaluated, test_metrics={"gap": 7.0, "accuracy": 0.75})) == 0.75
    for metrics in ({}, {"gap": 7.0}):
        better = replace(evaluated, test_loss=0.25, test_metrics=metrics)
        score, higher = find_score(replace(evaluated, test_metrics=metrics)), find_score(better)
        assert score is not None and higher is not None and higher > score


def test_a_position_that_cannot_be_read_ends_the_attempt_and_not_the_job(tmp_path, monkeypatch):
    def fail(_: Found) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    found = Found(tmp_path / "step-1", mock.Mock(configuration={}))
    session = mock.Mock(broadcast=lambda value: value)
    monkeypatch.setattr(resuming, "read_values", fail)
    monkeypatch.setattr(resuming, "_choose", lambda *_: found)
    monkeypatch.setattr(resuming, "check_fit", lambda *_: [])
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
    assert resuming._is_this_jobs(found) is expected


def test_a_short_run_has_a_checkpoint_after_its_first_epoch(session, tmp_path, monkeypatch, capsys):
    # Any time is too long for the others.
    monkeypatch.setattr(saving, "parse_interval", lambda _: Interval(epochs=1, share=0.0))
    words = ["--data", "toy", "--samples", "200", "--epochs", "4", "--name", "first"]
    train(parse([*words, "--runs-dir", str(tmp_path)]), session, FailureHandler())
    found = sorted(path.name for path in (tmp_path / "first" / "checkpoints").glob("step-*"))
    assert found == ["step-10", "step-40"]
    assert "Checkpoints: after each epoch if writing takes up to 1%" in capsys.readouterr().out


def test_an_epoch_of_a_version_that_timed_fewer_stages_goes_on() -> None:
    session, task = SimpleNamespace(device=torch.device("cpu")), SimpleNamespace(metrics={})
    training: Any = SimpleNamespace(session=session, task=task)
    sums = EpochSums(training, Position())
    state = sums.state_dict()
    state["costs"] = {"seconds": [1.0, 2.0, 3.0, 4.0, 5.0, 6.0], "steps": 7}
    sums.load_state_dict(state)
    assert sums.costs.seconds == [1, 0, 2, 3, 4, 5, 6] and sums.costs.steps == 7

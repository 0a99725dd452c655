"""Preempted jobs on a real cluster: they are requeued, and end as if nothing had happened."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from test_jobs import JOBS, Submitter

import launchers

pytestmark = [pytest.mark.slurm, pytest.mark.long]

SECONDS = 300.0
# Long enough for a job to be in the middle of it, at about 0.2 s an epoch.
TRAINING = (
    "--data", "toy", "--samples", "2000", "--batch-size", "8", "--epochs", "150", "--name", "run",
    "--evaluate-every", "50", "--save-every", "15min",
)  # fmt: skip
ON_TWO_NODES = ("--nodes=2", "--ntasks=2")


@pytest.fixture
def slurm(slurm_cluster: Any, tmp_path: Path) -> Submitter:
    return Submitter(slurm_cluster, tmp_path)


def read_rows(directory: Path) -> list[dict[str, Any]]:
    path = directory / "runs/run/metrics.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def check_end(slurm: Submitter, whole: list[dict[str, Any]], output: str, attempts: int) -> None:
    """Each epoch is there once, and the bits are the undisturbed run's."""
    rows = read_rows(slurm.directory)
    assert [row["epoch"] for row in rows] == [row["epoch"] for row in whole]
    for name in ("loss", "accuracy", "test_accuracy", "parameters", "step"):
        assert [row[name] for row in rows] == [row[name] for row in whole], name
    assert sorted({row["attempt"] for row in rows})[-1] == attempts
    stopped = [int(step) for step in re.findall(r"preempted after step (\d+): ", output)]
    resumed = [int(step) for step in re.findall(r"Resumed from \S+: step (\d+),", output)]
    # No step is lost.
    assert stopped == resumed and len(stopped) == attempts - 1, output


def read_output(slurm: Submitter, identity: str) -> str:
    [path] = (slurm.directory / "logs").glob(f"*-{identity}.out")
    return path.read_text()


def await_rows(slurm: Submitter, identity: str, count: int) -> None:
    what = f"{count} epochs of job {identity}"
    launchers.until(lambda: len(read_rows(slurm.directory)) >= count, what, SECONDS, pause=0.1)


def test_a_signal_and_a_job_of_higher_priority_requeue_the_job(slurm: Submitter) -> None:
    folder = slurm.directory / "whole"
    folder.mkdir()
    identity = slurm.submit(*ON_TWO_NODES, f"--chdir={folder}", f"{JOBS}/train.sbatch", *TRAINING)
    [job] = slurm.wait(identity, SECONDS)
    assert (job.state, job.code) == ("COMPLETED", 0), job.output
    whole = read_rows(folder)
    identity = slurm.submit(*ON_TWO_NODES, "--exclusive", f"{JOBS}/train.sbatch", *TRAINING)
    # What sbatch --signal has Slurm do, without waiting for minutes.
    await_rows(slurm, identity, 15)
    slurm.cluster.ask("scancel", "--signal=USR2", identity)
    await_rows(slurm, identity, 60)
    urgent = slurm.submit("--partition=urgent", "--nodes=4", "--exclusive", "--wrap=sleep 2")
    [ended] = slurm.wait(urgent, SECONDS)
    assert ended.state == "COMPLETED"
    assert len(read_rows(slurm.directory)) < len(whole)
    [job] = slurm.wait(identity, SECONDS)
    assert (job.state, job.code) == ("COMPLETED", 0), job.output
    check_end(slurm, whole, read_output(slurm, identity), attempts=3)


def test_a_job_that_is_cancelled_is_not_requeued(slurm: Submitter) -> None:
    identity = slurm.submit(*ON_TWO_NODES, f"{JOBS}/train.sbatch", *TRAINING)
    await_rows(slurm, identity, 5)
    slurm.cluster.ask("scancel", identity)
    [job] = slurm.wait(identity, SECONDS)
    assert job.state == "CANCELLED"
    # Its checkpoint is there none the less.
    assert len(list((slurm.directory / "runs/run/checkpoints").glob("step-*"))) == 1

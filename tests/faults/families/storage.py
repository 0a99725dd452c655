"""Disks that are full when a checkpoint is written."""

from __future__ import annotations

import contextlib
import re
import subprocess
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from random import Random
from typing import Any

import launchers
from attempts import Family, Finding
from laboratory import INTERVAL, Laboratory, Training
from mpiddp.checkpoints.storage.manifest import find_problems, list_checkpoints, read_manifest

RANKS = 2
KINDS = ("full", "quota")
POLICIES = ("stop", "continue")
FAILED = re.compile(r"No space left on device|Disk quota exceeded")
REPORT = re.compile(r"a checkpoint in \S+ could not be written: .*the older ones are as they were")


def choose(dice: Random, number: int, parameters: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "kind": KINDS[number % 2],
        "policy": POLICIES[number // 2 % 2],
        "save": dice.randint(2, 4),
        "rank": dice.randrange(RANKS),
    }


@contextlib.contextmanager
def mount(folder: Path) -> Iterator[None]:
    """A disk of one mebibyte in ``folder``, made by root."""
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(folder)], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def make_rule(choice: Mapping[str, Any], disk: Path) -> dict[str, Any]:
    step = f"/step-{choice['save'] * INTERVAL}"
    if choice["kind"] == "full":
        return {
            "rank": 0, "event": "os.mkdir", "path": rf"{step}\.[\w-]+\.partial$",
            "action": "fill_disk", "target": str(disk),
        }  # fmt: skip
    return {
        "rank": choice["rank"], "event": "open", "path": rf"{step}\.[\w-]+\.partial/__\d_\d",
        "action": "fail_for_quota",
    }  # fmt: skip


def break_off(
    training: Training, choice: Mapping[str, Any], ballast: Path
) -> tuple[launchers.Result, float]:
    """What the job has left, and the seconds until it said that the save had failed."""
    # There is room again before the last checkpoint.
    hold = (str(ballast), 7 * INTERVAL + 1)
    with training.start([make_rule(choice, ballast)], hold=hold) as job:
        fired = training.await_fired(job)
        job.until(lambda: FAILED.search(job.stdout() + job.stderr()), "the report of the failure")
        seconds = time.time() - fired["time"]
        if choice["policy"] == "continue":
            ballast.unlink(missing_ok=True)
        return job.wait(), seconds


def attempt(choice: Mapping[str, Any], laboratory: Laboratory, folder: Path) -> Finding:
    with mount(folder / "runs"):
        options = ("--save-every", f"{INTERVAL}steps", "--on-save-error", choice["policy"])
        training, ballast = Training(folder, RANKS, options), folder / "runs" / "ballast"
        result, seconds = break_off(training, choice, ballast)
        lost = None
        if choice["policy"] == "stop":
            assert result.returncode == 1, result
            assert len(REPORT.findall(result.output)) == 1, result
            check_older(training, (choice["save"] - 1) * INTERVAL)
            ballast.unlink(missing_ok=True)
            resumed, lost = laboratory.go_on(training)
            assert resumed == (choice["save"] - 1) * INTERVAL
        else:
            assert result.returncode == 0, result
            assert "training goes on" in result.output, result
            laboratory.check_end(training)
    ends = {"stop": "stopped, resumed, bitwise equal", "continue": "went on, bitwise equal"}
    return Finding(ends[choice["policy"]], detected=seconds, lost_steps=lost)


def check_older(training: Training, step: int) -> None:
    """The checkpoint before is whole, and nothing is left of the one that failed."""
    folder = training.run / "checkpoints"
    assert all(re.fullmatch(r"step-\d+|lock|owner.json", path.name) for path in folder.iterdir())
    newest = list_checkpoints(folder)[0]
    assert newest.name == f"step-{step}"
    assert find_problems(newest, read_manifest(newest)) == []


DISK = Family(choose, attempt)

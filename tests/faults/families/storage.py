"""Checkpoints that rot, and disks that are full when one is written."""

from __future__ import annotations

import contextlib
import pickle
import re
import shutil
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from random import Random
from typing import Any
from unittest import mock

import torch

import launchers
from attempts import Family, Finding
from laboratory import INTERVAL, Laboratory, Training, find_resumed
from mpiddp.checkpoints.storage import finding
from mpiddp.checkpoints.storage.manifest import (
    MANIFEST,
    find_problems,
    list_checkpoints,
    read_manifest,
)
from mpiddp.checkpoints.storage.rank_group import RankGroup
from saves import METADATA, delete, flip, truncate

RANKS = 2
SHARDS = ("__0_0.distcp", "__1_0.distcp")


def swap(path: Path, _: float) -> None:
    """The two shards: each is whole, and has the other one's name."""
    first, second = (path.with_name(name) for name in SHARDS)
    between = path.with_name("between")
    first.rename(between)
    second.rename(first)
    between.rename(second)


KINDS: dict[str, tuple[Callable[[Path, float], None], tuple[str, ...]]] = {
    "byte flipped": (flip, (*SHARDS, METADATA, MANIFEST)),
    "file truncated": (truncate, (*SHARDS, METADATA, MANIFEST)),
    "file deleted": (delete, (*SHARDS, METADATA)),
    "shards swapped": (swap, SHARDS[:1]),
    "manifest missing": (delete, (MANIFEST,)),
}


PATCHING = threading.Lock()
"""Attempts run in several threads. Two patches of one function at once may leave it patched."""


def choose(dice: Random, number: int, parameters: Mapping[str, Any]) -> dict[str, Any]:
    kind = list(KINDS)[number % len(KINDS)]
    return {
        "kind": kind,
        "file": dice.choice(KINDS[kind][1]),
        "place": dice.random(),
        # The loader alone takes milliseconds, a training seconds.
        "trains": dice.random() < parameters["trained"],
    }


def attempt(choice: Mapping[str, Any], laboratory: Laboratory, folder: Path) -> Finding:
    whole = laboratory.find_whole(RANKS)
    training = Training(folder, RANKS)
    directory = training.run / "checkpoints"
    shutil.copytree(whole.run / "checkpoints", directory)
    newest, older = list_checkpoints(directory)[:2]
    damage, _ = KINDS[choice["kind"]]
    damage(newest / choice["file"], choice["place"])
    problem = check_loader(directory, newest, older)
    assert choice["file"] in problem or choice["kind"] == "file deleted", problem
    if not choice["trains"]:
        return Finding("found, fell back")
    # As if it had been interrupted: the whole one's rows, and no outcome.
    shutil.copy(whole.run / "metrics.jsonl", training.run)
    rows = (training.run / "metrics.jsonl").read_text().splitlines(keepends=True)
    (training.run / "metrics.jsonl").write_text("".join(rows[:-1]))
    output = training.finish()
    assert find_resumed(output) == int(older.name.partition("-")[2]), output
    assert f"{newest.name}.damaged" in output, output
    shutil.rmtree(directory / f"{newest.name}.damaged")
    laboratory.check_end(training)
    return Finding("found, fell back, bitwise equal at the end")


def check_loader(directory: Path, newest: Path, older: Path) -> str:
    """What the loader says of the newest one; it must not have unpickled anything of it."""
    me = threading.get_ident()

    def guard(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            # Attempts in other threads may read what they like.
            assert threading.get_ident() != me or arguments == (older,), "it was unpickled"
            return function(*arguments, **options)

        return call

    with (
        PATCHING,
        mock.patch.object(torch, "load", guard(torch.load)),
        mock.patch.object(pickle, "load", guard(pickle.load)),
        mock.patch.object(finding, "read_metadata", guard(finding.read_metadata)),
    ):
        survey = finding.find_newest(directory, RankGroup())
    assert survey.newest is not None and survey.newest.path == older
    assert list(survey.damaged) == [newest]
    return "; ".join(survey.damaged[newest])


DAMAGE = Family(choose, attempt)


DISK_KINDS = ("full", "quota")
POLICIES = ("stop", "continue")
FAILED = re.compile(r"No space left on device|Disk quota exceeded")
REPORT = re.compile(r"a checkpoint in \S+ could not be written: .*the older ones are as they were")


def choose_disk(dice: Random, number: int, parameters: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "kind": DISK_KINDS[number % 2],
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


def attempt_disk(choice: Mapping[str, Any], laboratory: Laboratory, folder: Path) -> Finding:
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


DISK = Family(choose_disk, attempt_disk)

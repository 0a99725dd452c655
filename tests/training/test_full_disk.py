"""A disk that is full: a small file system in a mount namespace."""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

import launchers

pytestmark = pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("unshare") is None, reason="mounts are made by root"
)

FILL = """
import errno, os
def fill(folder):
    with open(folder + "/ballast", "ab", buffering=0) as file:
        for size in (4096, 1):
            try:
                while True:
                    file.write(bytes(size))
            except OSError as error:
                assert error.errno == errno.ENOSPC
def empty(folder):
    os.unlink(folder + "/ballast")
"""

METRICS = """
import json, sys
from dataclasses import replace
from pathlib import Path
from mpiddp.training.records.metrics import Row
from mpiddp.training.records.metrics_file import MetricsFile
row = Row(attempt=1, epoch=1, step=1, loss=0.0, metrics={"accuracy": 0.0}, learning_rate=0.0,
          samples_per_second=0.0, seconds=0.0)
path = Path(sys.argv[1], "metrics.jsonl")
file = MetricsFile(path)
found = []
def append(epoch):
    problem = file.append(replace(row, epoch=epoch))
    found.append([problem, path.read_text()])
epoch = 0
while path.exists() is False or path.stat().st_size % 4096 < 3900:
    epoch += 1
    append(epoch)
fill(sys.argv[1])
for _ in range(2):
    epoch += 1
    append(epoch)
empty(sys.argv[1])
append(epoch + 1)
print(json.dumps(found))
"""

OUTCOME = """
import json, sys
from pathlib import Path
from mpiddp.process.outcome import Outcome, read_outcome, write_outcome
folder = Path(sys.argv[1])
write_outcome(folder, Outcome(6, "lost", 0, "here", 3, 1))
fill(sys.argv[1])
try:
    write_outcome(folder, Outcome(1, "x" * 9000, 0, "here", 4, 1))
except OSError as error:
    problem = error.strerror
print(json.dumps([problem, read_outcome(folder), sorted(path.name for path in folder.iterdir())]))
"""

LOCK = """
import json, sys
from pathlib import Path
from mpiddp.errors import ConfigurationError
from mpiddp.training.options.config import Configuration
from mpiddp.training.records.run_directory import open_run
configuration = Configuration(name="a", runs_dir=Path(sys.argv[1])).resolve()
attempts = []
def take():
    run = open_run(configuration)
    attempts.append(run.attempt)
    run.close()
take()
take()
fill(sys.argv[1])
try:
    take()
except ConfigurationError as error:
    problem = str(error)
empty(sys.argv[1])
take()
print(json.dumps([attempts, problem]))
"""


def run_on_small_disk(program: str, folder: Path) -> Any:
    """What the program prints; its argument is a disk of 64 KiB."""
    mount = f'mount -t tmpfs -o size=64k tmpfs "{folder}" && exec "$@"'
    command = ["unshare", "--mount", "sh", "-c", mount, "sh", sys.executable, "-c", FILL + program]
    return json.loads(launchers.execute(*command, folder).expect(0).stdout)


def test_metrics_have_whole_rows_and_lose_none(tmp_path: Path) -> None:
    found = run_on_small_disk(METRICS, tmp_path)
    *before, first, second, last = found
    assert all(problem == "" for problem, _ in before)
    for problem, text in (first, second):
        assert problem.endswith(
            "metrics.jsonl could not be written: No space left on device (0 B free)"
        )
        assert text == before[-1][1]
    assert last[0] == ""
    epochs = [json.loads(line)["epoch"] for line in last[1].splitlines()]
    assert epochs == list(range(1, len(found) + 1))


def test_an_outcome_that_finds_no_room_leaves_the_old_one(tmp_path: Path) -> None:
    problem, outcome, names = run_on_small_disk(OUTCOME, tmp_path)
    assert problem == "No space left on device (8.92 KiB needed, 0 B free)"
    assert (outcome["code"], outcome["step"]) == (6, 3)
    assert names == ["ballast", "outcome.json"]


def test_a_run_on_a_full_disk_is_refused_and_keeps_its_number_of_attempts(tmp_path: Path) -> None:
    attempts, problem = run_on_small_disk(LOCK, tmp_path)
    # The third was refused when its configuration found no room.
    assert attempts == [1, 2, 4]
    assert "No space left on device (" in problem
    assert problem.endswith(" needed, 0 B free): choose another --runs-dir")


SAVES = """
import os, sys, torch, mpiddp
import torch.distributed as dist
folder, keep, last = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
if "RANK" in os.environ:
    dist.init_process_group("gloo")
model = torch.nn.Linear(400, 400)
with mpiddp.Checkpointer(folder, model, keep=keep) as checkpointer:
    begun = (checkpointer.restore() or {"step": 0})["step"]
    for step in range(begun + 1, last + 1):
        checkpointer.save(step)
print("from", begun, "to", last)
"""


@pytest.mark.mpi
def test_a_save_that_finds_no_room_is_one_line_and_to_keep_fewer_helps(tmp_path: Path) -> None:
    """Two ranks fill the disk, whose newest checkpoints one process then goes on from."""
    script, disk = tmp_path / "saves.py", tmp_path / "disk"
    script.write_text(SAVES)
    disk.mkdir()
    lines = [
        f'mount -t tmpfs -o size=3m tmpfs "{disk}"',
        f'"{sys.executable}" -m mpiddp -n 2 "{script}" "{disk}/c" 9 9; echo "code $?"',
        f'ls "{disk}/c"',
        f'"{sys.executable}" "{script}" "{disk}/c" 1 6',
    ]
    command = ["unshare", "--mount", "sh", "-c", "\n".join(lines)]
    result = launchers.execute(*command, timeout=160).expect(0)
    (said,) = (line for line in result.stderr.splitlines() if "could not be written" in line)
    assert re.search(
        rf"rank \d of 2 on .*: a checkpoint in {disk}/c could not be written: rank \d on \S+: .*No "
        r"space left on device \([\d.]+ KiB needed, [\d.]+ KiB free\): free some there, lower "
        "keep, or choose another directory; the older ones are as they were$",
        said,
    )
    assert "Traceback" not in result.output
    names = ["lock", "owner.json", *(f"step-{step}" for step in range(1, 5))]
    assert result.stdout.splitlines()[-len(names) - 2 :] == ["code 1", *names, "from 4 to 6"]

"""The trainer on a disk that is full after its first checkpoint, until two saves have failed.

python full_disk.py DIRECTORY OPTION…   where DIRECTORY is the disk
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any
from unittest import mock

from mpiddp.checkpoints.storage.manifest import find_problems, read_manifest

FAILURES = 2
disk = Path(sys.argv[1])


def fill() -> None:
    with (disk / "ballast").open("ab", buffering=0) as file:
        for size in (4096, 1):
            try:
                while True:
                    file.write(bytes(size))
            except OSError:
                continue


def describe(began: float, rank: int) -> str:
    """What a rank finds when it hears of a save that failed.

    Rank 0 looks, since the next save begins without the others, but not without it.
    """
    folder = disk / "runs/run/checkpoints"
    paths = sorted(folder.glob("step-*")) if rank == 0 else []
    problems = [find_problems(path, read_manifest(path)) for path in paths]
    return json.dumps(
        {
            "seconds": time.monotonic() - began,
            "names": [path.name for path in paths],
            "problems": problems,
        }
    )


def main() -> None:
    from mpiddp.checkpoints.storage.directory import CheckpointDirectory
    from mpiddp.train import main as train

    sys.argv[1:] = [*sys.argv[2:], "--runs-dir", str(disk / "runs")]
    start, wait = CheckpointDirectory.start, CheckpointDirectory.wait
    began, failures = 0.0, 0

    def begin(self: CheckpointDirectory, *arguments: Any, **options: Any) -> None:
        nonlocal began
        start(self, *arguments, **options)
        began = time.monotonic()

    def finish(self: CheckpointDirectory) -> None:
        nonlocal failures
        has_save = self._save is not None
        try:
            wait(self)
        except OSError:
            failures += 1
            print(f"rank {self.ranks.rank} hears: {describe(began, self.ranks.rank)}", flush=True)
            if failures == FAILURES and self.ranks.rank == 0:
                os.unlink(disk / "ballast")
            raise
        if has_save and self.ranks.rank == 0 and not failures and not (disk / "ballast").exists():
            fill()

    with (
        mock.patch.object(CheckpointDirectory, "start", begin),
        mock.patch.object(CheckpointDirectory, "wait", finish),
    ):
        train()


if __name__ == "__main__":
    main()

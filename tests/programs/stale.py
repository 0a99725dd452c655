"""Ranks that see another directory than rank 0, for a while or for good."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch

import mpiddp
from mistakes import hear
from mpiddp.checkpoints.storage import directory as directories
from mpiddp.checkpoints.storage import finding
from mpiddp.checkpoints.storage import manifest as manifests
from mpiddp.checkpoints.storage.directory import CheckpointDirectory, CheckpointSource
from mpiddp.checkpoints.storage.finding import find_newest
from mpiddp.checkpoints.storage.manifest import DamageError
from mpiddp.checkpoints.storage.rank_group import RankGroup
from saves import Clock


def find_with_stale_rank(session: mpiddp.Session, folder: Path, stale: int, times: int) -> Any:
    """The newest checkpoint's name and all problems, or the error.

    Files are missing on rank ``stale``, so many times.
    """
    compare, left = manifests.compare, times if session.world.rank == stale else 0

    def compare_or_miss(*arguments: Any, **options: Any) -> str:
        nonlocal left
        left -= 1
        return "is missing" if left >= 0 else compare(*arguments, **options)

    with mock.patch.object(manifests, "compare", compare_or_miss):
        return _find(folder)


def find_without_manifest(session: mpiddp.Session, folder: Path, times: int) -> Any:
    """The same; rank 0 does not see the newest manifest, so many times."""
    read, left = finding._read_manifest, times if session.world.rank == 0 else 0

    def read_or_miss(path: Path) -> str:
        nonlocal left
        left -= 1
        if left >= 0:
            raise DamageError(["manifest.json is missing"])
        return read(path)

    with mock.patch.object(finding, "_read_manifest", read_or_miss):
        return _find(folder)


def _find(folder: Path) -> Any:
    ranks = RankGroup()
    with mock.patch.object(manifests, "time", Clock()):
        try:
            survey = find_newest(folder, ranks)
        except mpiddp.MpiddpError as error:
            return f"{type(error).__name__}: {error}"
        finally:
            ranks.close()
    problems = [each for found in survey.damaged.values() for each in found]
    return survey.newest.path.name, problems


@contextlib.contextmanager
def make_directory(folder: Path) -> Iterator[CheckpointDirectory]:
    """Of the attempt "a"; closed at the end."""
    ranks = RankGroup()
    directory = CheckpointDirectory(folder, ranks, CheckpointSource(attempt="a"), 2)
    try:
        yield directory
    finally:
        directory.close()
        ranks.close()


def open_apart(session: mpiddp.Session, folder: Path) -> str:
    """What ``open`` says where each rank has another directory."""
    own = folder / f"node-{session.world.rank}"
    own.mkdir()
    with make_directory(own) as directory, mock.patch.object(manifests, "time", Clock()):
        return hear(directory.open)


def save_apart(session: mpiddp.Session, folder: Path) -> str:
    """What a save says where rank 0 does not see the file of rank 1."""
    rank, write_shards = session.world.rank, directories.write_shards

    def write_elsewhere(*arguments: Any) -> Any:
        files = write_shards(*arguments)
        if rank == 0:
            (folder / "step-1.a.partial" / "__1_0.distcp").unlink()
        return files

    with (
        make_directory(folder) as directory,
        mock.patch.object(directories, "write_shards", write_elsewhere),
        mock.patch.object(manifests, "time", Clock()),
    ):
        directory.open()
        directory.start(1, {f"rank-{rank}.x": torch.ones(3)})
        return hear(directory.wait)

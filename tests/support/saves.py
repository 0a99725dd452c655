"""Checkpoints of a small state, written by this process alone."""

import contextlib
import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import xxhash

from mpiddp.checkpoints.storage.directory import CheckpointDirectory, CheckpointSource
from mpiddp.checkpoints.storage.finding import Survey
from mpiddp.checkpoints.storage.manifest import File, read_manifest, write_manifest
from mpiddp.checkpoints.storage.owner import LOCK, OWNER
from mpiddp.checkpoints.storage.rank_group import RankGroup

SHARD, METADATA = "__0_0.distcp", ".metadata"
STATE = {"weights": torch.arange(3000.0), "counts": torch.tensor([4, 5])}


def make_directory(path: Path, keep: int = 9, **values: Any) -> CheckpointDirectory:
    """Of the run 'a', which may begin anew there."""
    given = {"run": "a", "attempt": "attempt-1", "configuration": {"seed": 0}, "replaces": True}
    return CheckpointDirectory(path, RankGroup(), CheckpointSource(**{**given, **values}), keep)


def open_directory(
    path: Path, survey: Survey | None = None, **values: Any
) -> contextlib.closing[CheckpointDirectory]:
    directory = make_directory(path, **values)
    directory.open(survey)
    return contextlib.closing(directory)


def write(path: Path, *steps: int, score: float | None = None, **values: Any) -> None:
    with open_directory(path, **values) as directory:
        for step in steps:
            state = {**STATE, "step": torch.tensor(step)}
            directory.start(step, state, score)
        directory.wait()


class Clock:
    """In the place of the module ``time``: only who sleeps takes any, and all is over at once."""

    def __init__(self) -> None:
        self._now = 0.0

    def monotonic(self) -> float:
        return self._now

    def sleep(self, seconds: float) -> None:
        self._now += seconds


class Hostile:
    """Prints when it is unpickled."""

    def __reduce__(self) -> tuple[object, ...]:
        return print, ("run",)


def flip(path: Path, place: float) -> None:
    """A bit; ``place``: from 0 to 1."""
    content = bytearray(path.read_bytes())
    content[int(place * (len(content) - 1))] ^= 1 << int(place * 1e6) % 8
    path.write_bytes(content)


def truncate(path: Path, place: float) -> None:
    os.truncate(path, int(place * (path.stat().st_size - 1)))


def delete(path: Path, _: float) -> None:
    path.unlink()


def make_hostile(path: Path, name: str, content: bytes) -> None:
    """As somebody would who can write there: the manifest fits."""
    (path / name).write_bytes(content)
    manifest = read_manifest(path)
    file = File(len(content), xxhash.xxh3_128_hexdigest(content))
    write_manifest(path, replace(manifest, files={**manifest.files, name: file}))


def list_names(path: Path) -> list[str]:
    """All but what says whose the directory is."""
    return sorted({each.name for each in path.iterdir()} - {OWNER, LOCK})


def assert_equal(found: Mapping[str, Any], given: Mapping[str, Any]) -> None:
    """The same tensors by the same names."""
    assert found.keys() == given.keys()
    assert [name for name in given if not torch.equal(found[name], given[name])] == []

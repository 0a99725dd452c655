"""Checkpoints that rot: found before anything is unpickled, and the older one is taken."""

from __future__ import annotations

import pickle
import shutil
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from random import Random
from typing import Any
from unittest import mock

import torch

from attempts import Family, Finding
from laboratory import Laboratory, Training, find_resumed
from mpiddp.checkpoints.storage import finding
from mpiddp.checkpoints.storage.manifest import MANIFEST, list_checkpoints
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

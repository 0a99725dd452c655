"""Trainings that are cut off after a step, and what their last checkpoints hold."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path
from unittest import mock

import torch

from mpiddp.launch.session import Session
from mpiddp.training import trainer
from mpiddp.training.config import parse
from mpiddp.training.manifest import list_checkpoints
from mpiddp.training.saving import Saver
from mpiddp.training.shards import read_shards
from mpiddp.training.training_state import EpochTotals, Position


class CutError(Exception):
    pass


class CutSaver(Saver):
    """Ends the training once a step has been made, and what was due after it."""

    cut = 0

    def after_step(self, position: Position, epoch: EpochTotals) -> None:
        super().after_step(position, epoch)
        self._cut(position)

    def after_epoch(self, position: Position, *, is_last: bool) -> None:
        super().after_epoch(position, is_last=is_last)
        self._cut(position)

    def _cut(self, position: Position) -> None:
        if position.step == self.cut:
            self._task.engine.update.close()
            self.close()
            raise CutError


def run(session: Session, words: Sequence[str], cuts: Sequence[int]) -> None:
    """Train with the command line, cut off after each of the steps, and begun again."""
    torch.set_num_threads(1)
    for cut in (*cuts, -1):
        CutSaver.cut = cut
        # Another process would have drawn other numbers by now.
        torch.rand(7)
        with mock.patch.object(trainer, "Saver", CutSaver), contextlib.suppress(CutError):
            trainer.train(parse(list(words)), session, session._resources.failure_handler)


def read_last(run_directory: Path) -> dict[str, torch.Tensor]:
    """All tensors of the newest checkpoint; without JSON, which has the times in it."""
    tensors = read_shards(list_checkpoints(run_directory / "checkpoints")[0], "")
    return {name: each for name, each in tensors.items() if not name.endswith(":structure")}

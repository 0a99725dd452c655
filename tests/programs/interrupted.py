"""Trainings that are cut off after a step, and what their last checkpoints hold."""

import hashlib
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from mpiddp.checkpoints.storage.manifest import list_checkpoints
from mpiddp.checkpoints.storage.shards import read_shards
from mpiddp.launch.mpi.pauses import wait_until
from mpiddp.launch.session import Session, find_failure_handler
from mpiddp.sync.parameter_server.serving import Serving
from mpiddp.sync.parameter_server.staleness import Clock
from mpiddp.training import trainer
from mpiddp.training.exported_weights import digest_parameters
from mpiddp.training.options.config import Configuration, parse
from mpiddp.training.records import run_directory
from mpiddp.training.saving import Saver

records: list[str | bytes | int] = []
opened: list[run_directory.RunDirectory] = []
original_open_run = run_directory.open_run
original_take_batch = trainer.Loop.take_batch


class CutError(Exception):
    pass


class CutSaver(Saver):
    """Ends the training once a step has been made, and what was due after it."""

    cut = 0

    def after_step(self, prepare: Callable[[], object]) -> None:
        super().after_step(prepare)
        self.see(self._state.position.step)

    def after_epoch(self) -> None:
        super().after_epoch()
        self.see(self._state.position.step)

    def restore(self) -> None:
        super().restore()
        records.append(digest_parameters(self._training.engine.module))
        records.append(torch.initial_seed())

    def save_end(self) -> None:
        super().save_end()
        self.see(self._state.position.step)

    def see(self, step: int) -> None:
        if step == self.cut:
            records.append(digest_parameters(self._training.engine.module))
            self._training.engine.update.close()
            self.close()
            raise CutError


def open_run(configuration: Configuration, pause: Any) -> run_directory.RunDirectory:
    opened.append(original_open_run(configuration, pause))
    return opened[-1]


def take_batch(loop: trainer.Loop, step: trainer.Step, *rest: Any) -> None:
    for sample in step.batch.inputs:
        records.append(hashlib.sha256(sample.numpy().tobytes()).digest())
    original_take_batch(loop, step, *rest)


def run_late(session: Session, words: Sequence[str], cuts: Sequence[int]) -> list[Any]:
    """As `run`; a rank that only serves is late wherever it looks how far its workers are."""
    slowest, begin_at = Clock.slowest, Serving.begin_at

    def look_late(clock: Clock) -> int:
        found = slowest.__get__(clock)
        # Workers wait for the server's thread.
        if threading.current_thread() is threading.main_thread():
            time.sleep(0.05)
        return found

    def begin_late(serving: Serving, step: int) -> None:
        if (server := serving._server) is not None:
            assert wait_until(lambda: slowest.__get__(server.clock) > step, 30, 0.01)
        begin_at(serving, step)

    with (
        mock.patch.object(Clock, "slowest", property(look_late)),
        mock.patch.object(Serving, "begin_at", begin_late),
    ):
        return run(session, words, cuts)


def run(
    session: Session, words: Sequence[str], cuts: Sequence[int], to_end: bool = True
) -> list[Any]:
    """Train with the command line, cut off after each of the steps, and begun again.

    Returns, in their order, a digest of each sample, digests of the parameters wherever training
    began or was cut off, and the seed of what the model draws wherever it began.
    """
    torch.set_num_threads(1)
    records.clear()
    for cut in (*cuts, -1) if to_end else cuts:
        CutSaver.cut = cut
        # Another process would have drawn other numbers by now.
        torch.rand(7)
        with (
            mock.patch.object(trainer, "Saver", CutSaver),
            mock.patch.object(trainer.Loop, "take_batch", take_batch),
            mock.patch.object(run_directory, "open_run", open_run),
        ):
            try:
                trainer.train(parse(list(words)), session, find_failure_handler(session))
            except CutError:
                # As the end of the process would.
                while opened:
                    opened.pop().close()
            opened.clear()
    return list(records)


def read_last(run_directory: Path) -> dict[str, torch.Tensor]:
    """All tensors of the newest checkpoint; without JSON, which has the times in it."""
    tensors = read_shards(list_checkpoints(run_directory / "checkpoints")[0], "")
    return {name: each for name, each in tensors.items() if not name.endswith(":structure")}

"""Trainings that a signal reaches in a certain step of a certain rank, and that are begun again."""

from __future__ import annotations

import contextlib
import hashlib
import signal
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch

from mpiddp.errors import PreemptedError
from mpiddp.launch.mpi.pauses import wait_until
from mpiddp.launch.session import Session, find_failure_handler
from mpiddp.process import step_agreement as agreement
from mpiddp.process.preemption_signals import PreemptionSignals
from mpiddp.training import saving, trainer
from mpiddp.training.exported_weights import digest_parameters
from mpiddp.training.options.config import parse
from mpiddp.training.saving import Saver
from mpiddp.training.task.task import find_task
from mpiddp.training.trainer import RunHandlers

PERIOD = 0.005
SECONDS = 60.0
"""For the signal to be seen."""
SEEN = "seen"
"""Key of the number of ranks that have seen a decision."""
SLOW_STEPS, PAUSE = (20, 35), 0.3
"""After these the last rank begins its checkpoint so much later than the others."""


class MadeUpSignals(PreemptionSignals):
    """None of this process's."""

    def __init__(self, received: signal.Signals | None = None) -> None:
        self.received = received
        self._is_heeded = False
        self._numbers = (signal.SIGUSR2,)  # It listens already.


class WatchedAgreement(agreement.StepAgreement):
    """Can be asked whether it has seen the signal."""

    last: WatchedAgreement

    def __init__(self, *values: Any) -> None:
        super().__init__(*values)
        WatchedAgreement.last = self

    def _wait_for_decision(self) -> bool:
        is_decided = super()._wait_for_decision()
        if is_decided:
            self._members.store.add(self._key(SEEN), 1)
        return is_decided

    def is_seen(self) -> bool:
        """Whether all ranks have seen the decision, also those that compute nothing."""
        return bool(self._members.store.add(self._key(SEEN), 0) == self._members.size)


@contextlib.contextmanager
def watched() -> Iterator[None]:
    with (
        mock.patch.object(agreement, "PERIOD", PERIOD),
        mock.patch.object(saving, "StepAgreement", WatchedAgreement),
    ):
        yield


def leave(session: Session, words: Sequence[str], last: int, *, is_called: bool = False) -> str:
    """Train with the command line, and leave the loop after step ``last`` of each rank; returns a
    digest of the weights that a script has then.

    ``is_called``: a signal has come, and all ranks have agreed to leave after that very step.
    """
    torch.set_num_threads(1)
    task, configuration = find_task(parse(list(words)), None)
    signals = MadeUpSignals()
    trainings: list[Any] = []
    handlers = RunHandlers(find_failure_handler(session), signals, trainings.append)
    with (
        watched(),
        contextlib.closing(trainer.run_steps(configuration, task, session, handlers)) as steps,
    ):
        for taken, step in enumerate(steps, start=1):
            if taken == last and is_called:
                signals.received = signal.SIGUSR2
                assert WatchedAgreement.last._round.decided.wait(SECONDS)
            step.take()
            if taken == last:
                break
    return digest_parameters(trainings[0].engine.module)


def train(session: Session, words: Sequence[str], signals: MadeUpSignals) -> int | None:
    """The step after which all ranks left, if a signal made them leave."""
    handler = find_failure_handler(session)
    with mock.patch.object(trainer, "Saver", RecordingSaver), watched():
        try:
            trainer.train(parse(list(words)), session, handler, signals)
        except PreemptedError:
            return handler.step or 0
    return None


@dataclass
class RankRecord:
    batches: int = 0
    """That it has trained on."""
    samples: list[bytes] = field(default_factory=list)
    """Digests of those that it has trained on, in their order."""
    weights: list[str] = field(default_factory=list)
    """Digests, when it began and when it left."""
    left: int | None = None
    """The step after which it left, if a signal made it leave."""


class RecordingSaver(Saver):
    """Records the weights that a training begins with, and those with which it leaves."""

    found: RankRecord

    def restore(self) -> None:
        super().restore()
        self.found.weights.append(digest_parameters(self._training.engine.module))

    def save_last(self) -> None:
        super().save_last()
        self.found.weights.append(digest_parameters(self._training.engine.module))

    def write(self) -> None:
        world = self._training.session.world
        if self._state.position.step in SLOW_STEPS and world.rank == world.size - 1:
            time.sleep(PAUSE)
        super().write()


def run_apart(
    session: Session, words: Sequence[str], call: tuple[Sequence[int], int] | None
) -> RankRecord:
    """Train with the command line. ``call``: the ranks that a signal reaches, and after how many
    batches of each worker; those that have as many, or their first, wait until all ranks have
    agreed.
    """
    torch.set_num_threads(1)
    RecordingSaver.found = found = RankRecord()
    signals = MadeUpSignals()
    ranks, batches = call if call is not None else ((), 0)
    take = trainer.Loop.take_batch

    def receive() -> None:
        if session.world.rank in ranks:
            signals.received = signal.SIGUSR2

    def take_batch(loop: trainer.Loop, step: trainer.Step, *rest: Any) -> None:
        take(loop, step, *rest)
        inputs = step.batch.inputs
        found.samples.extend(hashlib.sha256(each.numpy().tobytes()).digest() for each in inputs)
        found.batches += 1
        if call is not None and found.batches == max(batches, 1):
            receive()
            assert wait_until(WatchedAgreement.last.is_seen, SECONDS, PERIOD)

    if batches == 0:
        receive()
    with mock.patch.object(trainer.Loop, "take_batch", take_batch):
        found.left = train(session, words, signals)
    return found

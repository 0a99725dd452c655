"""Trainings that a signal reaches in a certain step of a certain rank, and that are begun again."""

from __future__ import annotations

import signal
import time
from collections.abc import Sequence
from unittest import mock

import torch

from mpiddp.errors import PreemptedError
from mpiddp.launch.preemption_signals import PreemptionSignals
from mpiddp.launch.session import Session
from mpiddp.training import pauses, preemption, trainer
from mpiddp.training.config import parse
from mpiddp.training.saving import Saver
from mpiddp.training.training_state import EpochTotals, Position

PERIOD = 0.005
SECONDS = 30.0
"""For the signal to be seen."""


class MadeUpSignals(PreemptionSignals):
    """None of this process's."""

    def __init__(self) -> None:
        self.received = None
        self.is_heeded = False


class WatchedPreemption(preemption.Preemption):
    """Can be asked whether it has seen the signal."""

    last: WatchedPreemption

    def __init__(self, signals: PreemptionSignals, peers: preemption.Peers) -> None:
        super().__init__(signals, peers)
        WatchedPreemption.last = self


class SignalledSaver(Saver):
    """Receives the signal after a step, and lets it be seen before the next one."""

    signals: MadeUpSignals
    step = 0

    def after_step(self, position: Position, epoch: EpochTotals) -> None:
        super().after_step(position, epoch)
        self._receive(position)

    def after_epoch(self, position: Position, *, is_last: bool) -> None:
        super().after_epoch(position, is_last=is_last)
        self._receive(position)

    def _receive(self, position: Position) -> None:
        if position.step == self.step:
            self.signals.received = signal.SIGUSR2
            deadline = time.monotonic() + SECONDS
            while not WatchedPreemption.last._is_called and time.monotonic() < deadline:
                time.sleep(PERIOD)


def run(session: Session, words: Sequence[str], steps: Sequence[tuple[int, int]]) -> list[int]:
    """Train with the command line; in the n-th start the signal reaches a rank after a step.

    ``steps``: for each start the rank and the step. Returns the steps after which all ranks left.
    """
    torch.set_num_threads(1)
    left = []
    for rank, step in (*steps, (-1, -1)):
        SignalledSaver.signals = signals = MadeUpSignals()
        SignalledSaver.step = step if rank == session.world.rank else -1
        handler = session._resources.failure_handler
        with (
            mock.patch.object(trainer, "Saver", SignalledSaver),
            mock.patch.object(preemption, "PERIOD", PERIOD),
            mock.patch.object(pauses, "Preemption", WatchedPreemption),
        ):
            try:
                trainer.train(parse(list(words)), session, handler, signals)
            except PreemptedError:
                left.append(handler.step or 0)
    return left

"""What ranks do between two steps: make checkpoints, and leave when they are asked to."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NoReturn

from mpiddp.errors import PreemptedError
from mpiddp.launch.preemption_signals import PreemptionSignals
from mpiddp.sync.parameter_server.roles import Serving
from mpiddp.training.preemption import Peers, Preemption
from mpiddp.training.preparation import Training
from mpiddp.training.saving import Saver
from mpiddp.training.training_state import EpochTotals, Position


@dataclass(frozen=True)
class Pauses:
    """What happens between two steps."""

    training: Training
    saver: Saver
    preemption: Preemption | None

    def after_step(self, position: Position, epoch: EpochTotals) -> None:
        """Not after an epoch's last step. Raises PreemptedError."""
        if self.preemption is not None and self.preemption.is_due():
            self.training.settle()
            self._leave(self.preemption.reason, position, epoch)
        self.saver.after_step(position, epoch)

    def is_due(self) -> bool:
        """Whether workers that share out batches are to pause; asked in a server's thread."""
        return self.saver.is_time() or (self.preemption is not None and self.preemption.is_next)

    def after_pause(self, position: Position, epoch: EpochTotals) -> None:
        """Such workers have paused within an epoch: make a checkpoint. Raises PreemptedError."""
        if self.preemption is not None and self.preemption.is_due():
            self._leave(self.preemption.reason, position, epoch)
        self.saver.write(position, epoch)

    def after_epoch(self, position: Position, *, is_last: bool) -> None:
        """Raises PreemptedError."""
        self.saver.after_epoch(position, is_last=is_last)
        if not is_last and self.preemption is not None and self.preemption.is_due():
            self._leave(self.preemption.reason, position, EpochTotals.make(self.training))

    def _leave(self, reason: str, position: Position, epoch: EpochTotals) -> NoReturn:
        self.saver.save(position, epoch)
        raise PreemptedError(
            f"preempted after step {position.step}: {reason}; the checkpoint is written"
        )

    def close(self) -> None:
        if self.preemption is not None:
            self.preemption.close()


def make_pauses(training: Training, saver: Saver, signals: PreemptionSignals | None) -> Pauses:
    """``signals`` that preempt the job; None where they have their usual effect. Collective."""
    preemption = None
    if signals is not None:
        world = training.session.world
        peers = Peers(world.rank, world.size, training.session.store, training.session.timeout)
        preemption = Preemption(signals, peers)
    pauses = Pauses(training, saver, preemption)
    if isinstance(training.engine.update, Serving):
        training.engine.update.pause_when(pauses.is_due)
    return pauses

"""Counts the bytes of gradients and weights that a rank sends, and the time they take."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from mpiddp.sync.ddp_hook import ScheduleHook
from mpiddp.sync.parameter_server.mpi_messages import ByteCounter
from mpiddp.training.step.stages import Costs, StageClock, StepStage


@dataclass(frozen=True)
class Traffic:
    """How it is known what a rank sends; nothing is counted of a rank that sends nothing."""

    step_bytes: float = 0.0
    """Of each step, if they are always the same."""
    hook: ScheduleHook | None = None
    """Averages gradients by a schedule, which says what this rank sends."""
    servers: ByteCounter | None = None
    """Of parameter servers: what this rank's threads send."""
    ddp: DistributedDataParallel | None = None
    """Averages gradients itself, and measures the time."""
    hides_nothing: bool = False
    """Whether each exchange is waited for, so that its time is that of the stage COMMUNICATION."""

    @cached_property
    def update_stage(self) -> StepStage:
        """What a rank's update belongs to: with servers, it waits for weights."""
        return StepStage.UPDATE if self.servers is None else StepStage.COMMUNICATION

    @cached_property
    def counts_passes(self) -> bool:
        """Whether `count` has something to do."""
        return self.hook is not None or self.servers is not None

    def forget(self) -> None:
        """What a schedule has sent so far belongs to no step.

        Of servers nothing is to be forgotten: between two epochs at most signs of life are sent,
        and an epoch's first weights may leave a server before its rank comes to the epoch.
        """
        if self.hook is not None:
            self.hook.take_exchange()

    def count(self, clock: StageClock) -> None:
        """After a backward pass: add what its gradients took."""
        if self.servers is not None:
            clock.costs.count_exchange(self.servers.take())
        if self.hook is not None:
            found = self.hook.take_exchange()
            clock.costs.count_exchange(found.sent_bytes)
            for begin, end in found.blocked:
                clock.count_exchange(begin, end, is_waited_for=True)
            if found.first_start is not None:
                clock.count_exchange(found.first_start, clock.read())

    def finish_epoch(self, costs: Costs) -> None:
        """Add what is only known at the end of an epoch."""
        sent, seconds = costs.steps * self.step_bytes, 0.0
        if self.servers is not None:
            sent += self.servers.take()
        if self.hides_nothing:
            seconds = costs.seconds[StepStage.COMMUNICATION]
        if self.ddp is not None:
            # DDP measures its first ten passes, then each hundredth.
            measured = self.ddp._get_ddp_logging_data()
            seconds = costs.steps * max(0, measured.get("avg_backward_comm_time", 0)) / 1e9
        costs.count_exchange(sent, seconds)


def find_traffic(model: nn.Module, hook: ScheduleHook | None) -> Traffic:
    """Of a model whose gradients are averaged by the hook, by DDP, or not at all."""
    if hook is not None:
        return Traffic(hook=hook)
    if not isinstance(model, DistributedDataParallel):
        return Traffic()
    # The bytes are those of a ring.
    ranks = model.process_group.size()
    size = sum(each.nbytes for each in model.parameters() if each.requires_grad)
    return Traffic(2 * (ranks - 1) / ranks * size, ddp=model)

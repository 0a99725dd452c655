"""Counts the bytes of gradients and weights that a rank sends, and the time they take."""

from __future__ import annotations

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from mpiddp.sync.ddp_hook import ScheduleHook
from mpiddp.sync.parameter_server.roles import Serving
from mpiddp.training.step.stages import Costs, Stage, StageClock


class Traffic:
    """Of a rank that sends nothing, and the interface of the others."""

    update_stage = Stage.UPDATE
    """What a rank's update belongs to."""
    counts_passes = False
    """Whether `count` has something to do."""

    def forget(self) -> None:
        """What was sent so far belongs to no step."""

    def count(self, clock: StageClock) -> None:
        """After a backward pass: add what its gradients took."""

    def finish_epoch(self, costs: Costs) -> None:
        """Add what is only known at the end of an epoch."""


class SteadyTraffic(Traffic):
    """Of ranks that send as many bytes in each step; their time is not known."""

    def __init__(self, step_bytes: float) -> None:
        self._bytes = step_bytes

    def finish_epoch(self, costs: Costs) -> None:
        costs.count_exchange(costs.steps * self._bytes)


class AveragingTraffic(Traffic):
    """Of ranks that average their weights: the bytes are counted there, and nothing is hidden."""

    def finish_epoch(self, costs: Costs) -> None:
        costs.count_exchange(0, costs.seconds[Stage.COMMUNICATION])


class FrameworkTraffic(SteadyTraffic):
    """Of DDP's own all-reduce: the bytes are those of a ring, the time is what DDP measures."""

    def __init__(self, model: DistributedDataParallel) -> None:
        self._model = model
        ranks = model.process_group.size()
        sizes = [each.nbytes for each in model.parameters() if each.requires_grad]
        super().__init__(2 * (ranks - 1) / ranks * sum(sizes))

    def finish_epoch(self, costs: Costs) -> None:
        super().finish_epoch(costs)
        # DDP measures its first ten passes, then each hundredth.
        measured = self._model._get_ddp_logging_data()
        nanoseconds = max(0, measured.get("avg_backward_comm_time", 0))
        costs.count_exchange(0, costs.steps * nanoseconds / 1e9)


class ScheduleTraffic(Traffic):
    """Of an algorithm: the bytes are those of its schedule, on this rank."""

    counts_passes = True

    def __init__(self, hook: ScheduleHook) -> None:
        self._hook = hook

    def forget(self) -> None:
        self._hook.take_exchange()

    def count(self, clock: StageClock) -> None:
        found = self._hook.take_exchange()
        clock.costs.count_exchange(found.sent_bytes)
        for begin, end in found.blocked:
            clock.count_exchange(begin, end, is_waited_for=True)
        if found.first_start is not None:
            clock.count_exchange(found.first_start, clock.read())


class ServerTraffic(Traffic):
    """Of parameter servers and their workers: what this rank's threads send, as they count it.

    Nothing is to be forgotten: between two epochs at most signs of life are sent. An epoch's first
    weights may leave a server before its rank comes to the epoch.
    """

    counts_passes = True
    update_stage = Stage.COMMUNICATION
    """A worker waits for the weights, which its servers change meanwhile."""

    def __init__(self, serving: Serving) -> None:
        self._counter = serving.sent

    def count(self, clock: StageClock) -> None:
        clock.costs.count_exchange(self._counter.take())

    def finish_epoch(self, costs: Costs) -> None:
        costs.count_exchange(self._counter.take(), costs.seconds[Stage.COMMUNICATION])


def observe(model: nn.Module, hook: ScheduleHook | None) -> Traffic:
    """The traffic of a model that is trained without parameter servers."""
    if hook is not None:
        return ScheduleTraffic(hook)
    return FrameworkTraffic(model) if isinstance(model, DistributedDataParallel) else Traffic()

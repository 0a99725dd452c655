"""What the steps of an epoch took on each rank, and which rank the others waited for."""

from __future__ import annotations

import resource
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from mpiddp.launch.session import Session
from mpiddp.training.records.history import STAGES
from mpiddp.training.records.metrics import Row
from mpiddp.training.records.network import Network
from mpiddp.training.step.stages import Costs, StepStage

SLOW = 1.5
"""A rank is reported if its own work takes this many times the others' median."""
SHORTEST = 0.5
"""Seconds of an epoch; a smaller difference is not reported."""


@dataclass(frozen=True)
class RankCosts:
    """Of one rank in one epoch."""

    hostname: str
    costs: Costs
    host_memory: int
    """The most that its process has had in memory so far, in bytes."""
    gpu_memory: int | None
    """The most that its tensors have had on its GPU so far, in bytes; None on a CPU."""
    network: Network | None = None
    """If it is tracked."""

    @property
    def bandwidth(self) -> float | None:
        """Bytes sent per second in which gradients were under way; None if nothing was sent, or
        the time is not known."""
        sent, seconds = self.costs.sent_bytes, self.costs.exchange_seconds
        return sent / seconds if sent > 0 and seconds > 0 else None

    @property
    def waiting(self) -> float:
        """Seconds of a step."""
        return self.costs.seconds[StepStage.COMMUNICATION] / self.costs.steps

    @property
    def reading(self) -> float:
        """Seconds of a step, with transforming."""
        seconds = self.costs.seconds
        return (seconds[StepStage.READ] + seconds[StepStage.TRANSFORM]) / self.costs.steps

    @property
    def computing(self) -> float:
        """Seconds of a step, with the transfer of the batch and the update."""
        return sum(self.costs.seconds) / self.costs.steps - self.waiting - self.reading

    def describe(self) -> str:
        """The line of this rank's log."""
        seconds = zip(STAGES, self.costs.seconds, strict=True)
        parts = [f"{name} {each:.3f} s" for name, each in seconds]
        read, transform = self.costs.data_seconds
        work = f"work on samples: read {read:.3f} s, transform {transform:.3f} s"
        sent = f"{self.costs.sent_bytes / 1e6:.1f} MB sent"
        if self.bandwidth is not None:
            sent += f" at {self.bandwidth / 1e6:.1f} MB/s"
        memory = f"{self.host_memory / 1e6:.0f} MB of memory"
        if self.gpu_memory is not None:
            memory += f", {self.gpu_memory / 1e6:.0f} MB of the GPU's"
        return f"{self.costs.steps} steps: {', '.join(parts)}; {work}; {sent}; {memory}"


def gather_costs(session: Session, costs: Costs, network: Network | None = None) -> list[RankCosts]:
    """Every rank's, by rank. Collective."""
    device = session.device
    on_gpu, module = device.type != "cpu", torch.get_device_module(device)
    gpu = module.max_memory_allocated(device) if on_gpu else None
    host = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return session.gather(RankCosts(session.world.hostname, costs, host, gpu, network))


def add_costs(row: Row, found: Sequence[RankCosts]) -> Row:
    """The row with what the epoch took."""
    computing = [each.costs for each in found if each.costs.steps]
    on_gpus = [each.gpu_memory for each in found if each.gpu_memory is not None]
    return replace(
        row,
        stages=_average([each.seconds for each in computing]),
        data_seconds=_average([each.data_seconds for each in computing]),
        sent_bytes=[round(each.costs.sent_bytes) for each in found],
        bandwidth=[each.bandwidth for each in found],
        network=_join_nodes(found),
        host_memory=max(each.host_memory for each in found),
        gpu_memory=max(on_gpus, default=None),
    )


def _join_nodes(found: Sequence[RankCosts]) -> list[dict[str, Any]] | None:
    """What the ranks of each node have measured; None if they have not."""
    nodes: dict[str, dict[str, Any]] = {}
    for each in found:
        if each.network is not None:
            empty = {"host": each.hostname, "counted_bytes": 0, "interfaces": {}}
            node = nodes.setdefault(each.hostname, empty)
            node["counted_bytes"] += each.network.counted_bytes
            node["interfaces"] |= each.network.interfaces
    return list(nodes.values()) or None


def _average(seconds: Sequence[Sequence[float]]) -> dict[str, float]:
    """Means over the ranks, by the names of stages."""
    return dict(zip(STAGES, map(statistics.fmean, zip(*seconds, strict=True)), strict=False))


def describe_slow_rank(found: Sequence[RankCosts]) -> str | None:
    """The console's line on the rank that the others wait for; None if there is none.

    It is the rank that waits least, if its own work takes `SLOW` times the median of the others'.
    """
    workers = [rank for rank, each in enumerate(found) if each.costs.steps]
    if len(workers) < 2:
        return None
    slow = min(workers, key=lambda rank: found[rank].waiting)
    own, others = found[slow], [found[rank] for rank in workers if rank != slow]
    work = own.reading + own.computing
    usual = statistics.median(each.reading + each.computing for each in others)
    if work < SLOW * usual or (work - usual) * own.costs.steps < SHORTEST:
        return None
    reading = statistics.median(each.reading for each in others)
    computing = statistics.median(each.computing for each in others)
    reads = own.reading - reading > own.computing - computing
    stage, slower, faster = (
        ("reading", own.reading, reading) if reads else ("computing", own.computing, computing)
    )
    return (
        f"Straggler: rank {slow} on {own.hostname} takes {work / usual:.1f} times as long as the "
        f"others, {stage} {1000 * slower:.1f} ms of a step instead of {1000 * faster:.1f}"
    )

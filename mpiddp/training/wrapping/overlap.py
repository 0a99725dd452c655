"""Measures whether gradients should travel during the backward pass or after it.

If a rank has no spare core, the thread that sends gradients slows the backward pass down, so
either way may be quicker. On a GPU gradients travel on a stream of their own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist

from mpiddp.errors import ConfigurationError
from mpiddp.sync.ddp_hook import ScheduleHook
from mpiddp.training.data.samples import Batch
from mpiddp.training.options.config import Configuration
from mpiddp.training.step.step import Compute
from mpiddp.training.wrapping.rehearsal import compute_plainly, find_medians, rehearse, time_once
from mpiddp.training.wrapping.shared_model import Replica

WARM_UP = 3
"""Passes that are not timed: DDP makes new buckets after the first, and the third use of a buffer
gives it large pages."""
ROUNDS = 5
GAIN = 0.05
"""Share of a pass that overlap must save; less may be noise."""


@dataclass(frozen=True)
class Pace:
    """Seconds of a forward and backward pass on the slowest rank, either way."""

    with_overlap: float
    without: float

    @property
    def pays(self) -> bool:
        """Whether overlap is the quicker way, by more than noise."""
        return self.with_overlap < (1 - GAIN) * self.without


def describe(pace: Pace) -> str:
    """What was measured, and why the quicker way was not taken if it was not."""
    text = f"{1e3 * pace.with_overlap:.2f} ms with overlap, {1e3 * pace.without:.2f} without"
    if pace.with_overlap < pace.without and not pace.pays:
        text += f": overlap is chosen if it saves more than {GAIN:.0%}, since less may be noise"
    return text


def settle(
    configuration: Configuration, replica: Replica, batch: Batch, compute: Compute = compute_plainly
) -> tuple[Configuration, Pace | None]:
    """Choose by measurement whether gradients travel during the backward pass, if that is open.

    The passes are taken in any case, so that DDP's buckets are the same ones from the first step
    on: whether the choice was made now or read from a configuration, and whether the run begins or
    goes on from a checkpoint. Nothing else is left of them. Collective; ``batch`` lies on this
    rank's device, and is as large as those to come.

    Returns the configuration with the choice, and what was measured.
    """
    hook, pace = replica.hook, None
    if configuration.overlap == "on" and hook is not None and not hook.can_overlap:
        raise ConfigurationError(
            "--overlap on: expected an MPI library with MPI_THREAD_MULTIPLE, found less; "
            "use --overlap auto"
        )
    with rehearse(replica.model, replica.model.module, batch, compute) as take_pass:
        for _ in range(WARM_UP):
            take_pass()
        if hook is None:
            return configuration, None
        if configuration.overlap == "auto" and hook.can_overlap:
            pace = measure(hook, take_pass, batch.device)
            hook.choose_overlap(pace.pays)
    return replace(configuration, overlap="on" if hook.overlap else "off"), pace


def measure(hook: ScheduleHook, take_pass: Callable[[], None], device: torch.device) -> Pace:
    """Time passes both ways, in turns; the same answer on all ranks. Collective.

    ``hook.overlap`` is as it was afterwards; what else the passes change is the caller's to
    restore. ``device``: of this rank.
    """
    before = hook.overlap
    times: dict[bool, list[float]] = {True: [], False: []}
    for _ in range(ROUNDS):
        for overlap, seconds in times.items():
            hook.choose_overlap(overlap)
            dist.barrier()
            seconds.append(time_once(take_pass, device))
    hook.choose_overlap(before)
    return Pace(*find_medians(times.values(), device))

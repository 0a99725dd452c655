"""``--batch-size auto``: the most samples of a step that fit into the memory of every rank.

Whole steps are tried, with a model that is made for this: nothing of them is left. All ranks try
the same size at the same time, and without any exchange: one that is out of memory would leave the
others waiting in it.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path

import torch

from mpiddp.errors import ConfigurationError
from mpiddp.launch.session import Session
from mpiddp.process.memory_limits import find_shortage
from mpiddp.training.data.samples import Batch
from mpiddp.training.data.structure import count_samples, map_leaves
from mpiddp.training.options.config import Configuration
from mpiddp.training.step.malloc import release_freed_memory
from mpiddp.training.step.step import split_batch
from mpiddp.wording import count_noun

SAMPLES = 16
"""Different samples in a batch that is tried; they are repeated."""
RESERVE = 0.05
"""Share of a GPU's memory, or of what a step takes on a CPU, for what is not tried here: NCCL's
buffers, fragments, an operation's working memory at another size."""
PROCESS = Path("/proc/self")


class StepTrial:
    """Takes steps of this rank, and measures what memory they take on a CPU."""

    def __init__(
        self,
        configuration: Configuration,
        session: Session,
        compute: Callable[[Batch], object],
        optimizer: torch.optim.Optimizer,
        few: Batch,
    ) -> None:
        """``compute``: the gradients of a batch. ``few``: any samples, on the model's device."""
        self._compute, self._optimizer, self._few = compute, optimizer, few
        self._passes, self._device = configuration.accumulation_steps, session.device
        self._is_gpu = session.device.type != "cpu"
        self._module = torch.get_device_module(session.device)
        # DDP makes new buckets while it has the old ones; a copy of averaged weights is as large.
        copies = (session.world.size > 1) + (configuration.ema is not None)
        groups = optimizer.param_groups
        self._more = copies * sum(each.nbytes for group in groups for each in group["params"])
        self._neighbours = session.world.local_size
        self._size, self._bytes = 0, 0
        """Of the last step, and what it took on a CPU."""

    def foresee(self, size: int) -> str:
        """Why a step of so many samples cannot be tried; empty if it can.

        A CPU's process that takes too much is killed, so the memory is judged by the last step's.
        """
        if self._is_gpu or not self._size:
            return ""
        needed = (1 + RESERVE) * self._bytes * size / self._size + self._more
        return find_shortage(int(self._neighbours * needed))

    def explain(self, size: int) -> str:
        """Take a step of so many samples; why it does not fit, or empty if it does."""
        problem = ""
        before = 0 if self._is_gpu else begin_peak()
        try:
            self._take_step(size)
        except RuntimeError as error:
            # An operation may have limits, too: a reason only if a smaller size works.
            if not self._size and not isinstance(error, torch.OutOfMemoryError):
                raise
            problem = str(error).strip().partition("\n")[0]
        else:
            self._size = size
            self._bytes = 0 if self._is_gpu else _read_memory("VmHWM") - before
        self._optimizer.zero_grad(set_to_none=True)
        gc.collect()
        if self._is_gpu:
            self._module.empty_cache()
            self._module.reset_peak_memory_stats(self._device)
        else:
            release_freed_memory()
        return problem

    def _take_step(self, size: int) -> None:
        held = 0
        if self._is_gpu:
            held = self._more + int(RESERVE * self._module.mem_get_info(self._device)[1])
        ballast = torch.empty(held, dtype=torch.uint8, device=self._device)
        places = torch.arange(size, device=self._device) % count_samples(self._few.targets)
        parts = (self._few.inputs, self._few.targets)
        batch = Batch(*(map_leaves(lambda each: each[places], part) for part in parts))
        # All other passes take as much as the second one.
        for part in split_batch(batch, self._passes)[:2]:
            self._compute(part)
        self._optimizer.step()
        if self._is_gpu:
            self._module.synchronize(self._device)
        del ballast


def find_size(explain: Callable[[int], str], most: int) -> tuple[int, str]:
    """The largest size up to ``most``, to an eighth of itself, and why it is not larger.

    ``explain``: why a size does not fit; empty if it does. The size is 0 if none does.
    """
    good, size = 0, min(2, most)
    while not (reason := explain(size)):
        if size == most:
            return most, ""
        good, size = size, min(2 * size, most)
    while size - good > max(1, good // 8):
        middle = (good + size) // 2
        if problem := explain(middle):
            size, reason = middle, problem
        else:
            good = middle
    return good, reason


def settle(
    configuration: Configuration, session: Session, trial: StepTrial | None, most: int
) -> tuple[int, str]:
    """The size of all ranks' batches, and the console's line. Collective.

    ``trial``: None on a rank that takes no steps. ``most``: samples of a step of this rank.

    Raises ConfigurationError if not one sample fits.
    """
    passes = configuration.accumulation_steps

    def agree(problem: str) -> str:
        found = enumerate(session.gather(problem))
        return next((f"on rank {rank}: {each}" for rank, each in found if each), "")

    def explain(count: int) -> str:
        size = count * passes
        problem = agree("" if trial is None else trial.foresee(size))
        return problem or agree("" if trial is None else trial.explain(size))

    count, reason = find_size(explain, most // passes)
    if count == 0:
        raise ConfigurationError(
            f"batch_size: auto found no size that fits, {reason}: give --precision bf16, "
            "--activation-checkpointing, or a smaller model"
        )
    size = count * passes
    why = f"more do not fit, {reason}" if reason else "a rank's share of the training samples"
    return size, f"Batch size: {count_noun(size, 'sample')} per rank, found by trial; {why}"


def begin_peak() -> int:
    """Have the kernel measure this process's peak from now on; what it has now, in bytes.

    Raises ConfigurationError if the kernel does not.
    """
    release_freed_memory()  # What is used again is not counted.
    try:
        (PROCESS / "clear_refs").write_text("5")
    except OSError as error:
        raise ConfigurationError(
            f"batch_size: auto cannot measure a CPU's memory here: {error}: give a number"
        ) from None
    return _read_memory("VmRSS")


def _read_memory(name: str) -> int:
    lines = (PROCESS / "status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:"))

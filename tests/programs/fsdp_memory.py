"""Memory of each rank's parameters, gradients and optimizer state: FSDP beside DDP.

    mpirun -n 4 python tests/programs/fsdp_memory.py

On CPUs the bytes of all tensors that are alive are counted at each operation, on GPUs by CUDA's
allocator. Activations are small beside them: there are few samples.
"""

import sys
from dataclasses import dataclass, replace
from typing import Any
from weakref import WeakSet

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import mpiddp
from mpiddp.launch.session import Session
from mpiddp.training.options.config import Configuration
from mpiddp.training.step.optimizer_step import make_optimizer
from mpiddp.training.step.sharded_tensors import find_local
from mpiddp.training.wrapping.fsdp import shard
from mpiddp.training.wrapping.module_groups import count_parameters, find_groups
from mpiddp.training.wrapping.shared_model import replicate

WIDTH, LAYERS, SAMPLES, STEPS = 384, 12, 2, 3
GPU_WIDTH = 2048
"""So that what CUDA's libraries take for themselves is little beside it."""
STATES = 4
"""Bytes per byte of parameters: parameters, gradients, AdamW's two moments."""


class LiveBytes(TorchDispatchMode):
    """Notes the most bytes of tensors that were alive at once, among those that it has seen."""

    def __init__(self) -> None:
        super().__init__()
        self._storages: WeakSet[torch.UntypedStorage] = WeakSet()
        self.peak = 0

    def see(self, tensors: Any) -> None:
        for each in tree_leaves(tensors):
            if isinstance(each, torch.Tensor) and each.device.type == "cpu":
                self._storages.add(find_local(each).untyped_storage())

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        outputs = function(*args, **(kwargs or {}))
        self.see((args, kwargs, outputs))
        self.peak = max(self.peak, sum(each.nbytes() for each in list(self._storages)))
        return outputs


@dataclass(frozen=True)
class Memory:
    """Of one rank, in bytes."""

    total: int
    """Parameters, gradients and optimizer state of the whole model."""
    largest: int
    """Parameters of the largest group."""
    peak: int
    """The most in a step."""


def make_model(width: int) -> nn.Module:
    torch.manual_seed(0)
    layers = [each for _ in range(LAYERS) for each in (nn.Linear(width, width), nn.Tanh())]
    return nn.Sequential(*layers, nn.Linear(width, 10))


def measure(session: Session, parallel: str) -> Memory:
    """Train for some steps; collective."""
    torch.set_num_threads(1)
    chosen: dict[str, Any] = {"parallel": parallel, "optimizer": "adamw"}
    device = session.device
    width = GPU_WIDTH if device.type == "cuda" else WIDTH
    # Each linear layer is a group.
    options = replace(Configuration(**chosen).resolve(), wrap_parameters=width * width)
    module = make_model(width)
    before = torch.cuda.memory_allocated() if device.type == "cuda" else 0
    counts = count_parameters(module, find_groups(module, options.wrap_parameters))
    if parallel == "fsdp":
        shard(module, session, options)
        model = module
    else:
        model = replicate(module, device, options).model
    optimizer = make_optimizer(options, list(module.parameters()))
    inputs = torch.randn(SAMPLES, width, device=device)
    labels = torch.zeros(SAMPLES, dtype=torch.int64, device=device)

    def take_step() -> None:
        optimizer.zero_grad(set_to_none=True)
        torch.autograd.backward(nn.functional.cross_entropy(model(inputs), labels))
        optimizer.step()

    if device.type == "cuda":
        peak = _find_cuda_peak(take_step) - before
    else:
        with LiveBytes() as live:
            live.see(list(module.parameters()))
            for _ in range(STEPS):
                take_step()
        peak = live.peak
    return Memory(4 * STATES * sum(counts), 4 * max(counts), peak)


def _find_cuda_peak(take_step: Any) -> int:
    take_step()
    torch.cuda.reset_peak_memory_stats()
    for _ in range(STEPS):
        take_step()
    return torch.cuda.max_memory_allocated()


def main() -> None:
    with mpiddp.init() as session:
        ranks = session.world.size
        for parallel in ("ddp", "fsdp"):
            found = measure(session, parallel)
            bound = found.total / ranks + 3 * found.largest
            if session.world.rank == 0:
                print(
                    f"{parallel}: {found.peak / 1e6:.1f} MB on each of {ranks} ranks; "
                    f"total / ranks + 3 groups = {bound / 1e6:.1f} MB",
                    file=sys.stdout,
                )


if __name__ == "__main__":
    main()

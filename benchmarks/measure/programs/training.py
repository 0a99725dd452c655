"""Small models that are trained by DistributedDataParallel and by FSDP2, as tutorials have it.

Nothing in it knows of mpiddp.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import distributed, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from benchmarks.measure.programs.transformer import make_mesh

BATCH = 8
"""Samples per rank."""

Wrap = Callable[[nn.Sequential, distributed.ProcessGroup], nn.Module]


def wrap_in_ddp(model: nn.Sequential, group: distributed.ProcessGroup) -> nn.Module:
    return DistributedDataParallel(model, process_group=group)


def shard(model: nn.Sequential, group: distributed.ProcessGroup) -> nn.Module:
    mesh = make_mesh(group)
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


class Training:
    """A step of the optimizer in each step; see `worker.SteppedProgram`."""

    def __init__(
        self,
        group: distributed.ProcessGroup | None,
        ranks: int,
        seed: int,
        wrap: Wrap,
        shape: tuple[int, int],
    ) -> None:
        """``shape``: layers, and their width. One process alone takes all ranks' samples."""
        layers, width = shape
        torch.manual_seed(seed)
        self._bare = nn.Sequential(
            *(
                nn.Sequential(nn.Linear(width, width), nn.LayerNorm(width), nn.GELU())
                for _ in range(layers)
            )
        )
        self._begin = self._list_values()
        whole = torch.randn(2, ranks, BATCH, width)
        own = whole.flatten(1, 2) if group is None else whole[:, group.rank()]
        self._inputs, self._targets = own
        self._model = self._bare if group is None else wrap(self._bare, group)
        self._optimizer = torch.optim.AdamW(self._model.parameters(), fused=True)

    def step(self) -> None:
        loss = nn.functional.mse_loss(self._model(self._inputs), self._targets)
        self._optimizer.zero_grad()
        loss.backward()
        self._optimizer.step()

    def look(self) -> torch.Tensor:
        """How far the parameters have moved. Collective."""
        return self._list_values() - self._begin

    def _list_values(self) -> torch.Tensor:
        found = [
            each.full_tensor() if isinstance(each, DTensor) else each
            for each in self._bare.parameters()
        ]
        return torch.cat([each.detach().flatten() for each in found])


train_by_ddp = partial(Training, wrap=wrap_in_ddp, shape=(32, 64))
"""128 parameters, 0.57 MB."""
train_by_fsdp = partial(Training, wrap=shard, shape=(6, 128))
"""Layers of 66 kB."""

"""A training by torch's own means; prints a digest of what it leaves, the same under any backend.

    python tests/torch_backend/trained.py WAYS FOLDER STORE

Its group has two ranks, of which it forks one: a sum of two numbers is the same in any order.
"""

import hashlib
import json
import os
import sys
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.distributed.checkpoint import load, save
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import mpiddp.torch_backend  # noqa: F401 - registers the backend

STEPS = 4
ZERO = partial(ZeroRedundancyOptimizer, optimizer_class=torch.optim.Adam)


def make_model() -> nn.Sequential:
    """Two layers, and buffers that ranks would have different."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))
    model.register_buffer("own", torch.full((3,), float(dist.get_rank())))
    return model


def train(model: nn.Module, kind: Any = torch.optim.Adam, accumulates: bool = False) -> list[float]:
    losses, optimizer = [], kind(model.parameters(), lr=0.01)
    for step in range(STEPS):
        generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
        values, targets = (torch.randn(4, width, generator=generator) for width in (6, 3))
        is_last = not accumulates or step % 2 == 1
        with nullcontext() if is_last else model.no_sync():
            loss = (model(values) - targets).square().mean()
            loss.backward()
        losses.append(loss.item())
        if is_last:
            optimizer.step()
            optimizer.zero_grad()
    return losses


def train_with_ddp(folder: str, hook: Any = None, **options: Any) -> list[Any]:
    model = DistributedDataParallel(make_model())
    if hook is not None:
        model.register_comm_hook(None, hook)
    return [train(model, **options), *model.state_dict().values()]


def train_with_fsdp(folder: str) -> list[Any]:
    """With a checkpoint in between."""
    mesh = init_device_mesh("cpu", (2,))

    def make() -> nn.Module:
        model = make_model()
        for layer in (model[0], model[-1]):
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        return model

    model = make()
    losses = train(model)
    save({"model": get_model_state_dict(model)}, checkpoint_id=folder)
    found = make()
    state = {"model": get_model_state_dict(found)}
    load(state, checkpoint_id=folder)
    losses += train(found)
    return [losses, *found.state_dict().values()]


WAYS: dict[str, Callable[[str], list[Any]]] = {
    "ddp": train_with_ddp, "hook": partial(train_with_ddp, hook=fp16_compress_hook),
    "no_sync": partial(train_with_ddp, accumulates=True),
    "zero": partial(train_with_ddp, kind=ZERO), "fsdp2": train_with_fsdp,
}  # fmt: skip


def digest(values: list[Any]) -> str:
    """Of numbers and tensors, bit by bit."""
    text = hashlib.sha256()
    for value in values:
        local = value.to_local() if isinstance(value, DTensor) else value
        text.update(repr(local.tolist() if isinstance(local, torch.Tensor) else local).encode())
    return text.hexdigest()[:16]


def main() -> None:
    """Train in each way under Gloo and under mpiddp; rank 0 prints the ranks' digests."""
    warnings.simplefilter("ignore")
    ways, folder, store = sys.argv[1:]
    rank = 1 if os.fork() == 0 else 0
    for backend in ("gloo", "mpiddp"):
        dist.init_process_group(backend, f"file://{store}-{backend}", rank=rank, world_size=2)
        for way in ways.split(","):
            digests: list[Any] = [None] * 2
            dist.all_gather_object(digests, digest(WAYS[way](f"{folder}/{backend}")))
            if dist.get_rank() == 0:
                print(json.dumps([way, dist.get_backend(), digests]), flush=True)
        dist.destroy_process_group()
    if rank == 0:
        assert os.waitstatus_to_exitcode(os.wait()[1]) == 0


if __name__ == "__main__":
    main()

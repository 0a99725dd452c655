"""Fully sharded data parallelism: each rank keeps its part of parameters, gradients, optimizer.

`fully_shard`_ gathers the parameters of one group of modules at a time, for the group's forward and
backward pass (Zhao et al., PyTorch FSDP, VLDB 2023).

.. _fully_shard: https://docs.pytorch.org/docs/stable/distributed.fsdp.fully_shard.html
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor

from mpiddp.errors import ConfigurationError
from mpiddp.launch.device.vendors import BACKENDS
from mpiddp.launch.session import Session
from mpiddp.training.options.groups.parallelism import ParallelismOptions
from mpiddp.training.wrapping.module_groups import count_parameters, find_groups
from mpiddp.wording import count_noun


def shard(module: nn.Module, session: Session, options: ParallelismOptions) -> str:
    """Shard a module, in place, over the ranks; collective.

    The module lies on the CPU, or on this rank's device; all ranks have rank 0's weights then. It
    is called as before: each forward pass is collective.

    Returns the console's line. Raises ConfigurationError for what is not possible here.
    """
    if options.cpu_offload and session.device.type == "cpu":
        raise ConfigurationError(
            "cpu_offload: expected GPUs, whose memory it saves, found CPUs: leave out --cpu-offload"
        )
    if session.any(session.device.type == "cpu") and session.any(session.device.type != "cpu"):
        raise ConfigurationError(
            "parallel: fsdp expected GPUs for all ranks or for none, found both: add --devices cpu "
            "or --devices cuda, or use --parallel ddp"
        )
    if session.device.type != "cpu" and session.backend not in BACKENDS:
        # It gathers parts with a call of Gloo's that takes CPU tensors alone, and does not look.
        raise ConfigurationError(
            f"parallel: fsdp expected {' or '.join(BACKENDS)} for GPUs, found {session.backend}: "
            "give each rank a GPU of its own, or use --parallel ddp"
        )
    mesh = _make_mesh(session, options)
    _share_weights(module, session.device)
    groups = find_groups(module, options.wrap_parameters)
    counts = count_parameters(module, groups)
    offload = CPUOffloadPolicy() if options.cpu_offload else OffloadPolicy()
    try:
        for each in [*groups, module]:
            fully_shard(each, mesh=mesh, reshard_after_forward=True, offload_policy=offload)
    except (NotImplementedError, ValueError) as error:
        raise ConfigurationError(f"parallel: fsdp cannot shard this model: {error}") from None
    return _describe(mesh, counts)


def _make_mesh(session: Session, options: ParallelismOptions) -> DeviceMesh:
    """All ranks in a row, or in a table of nodes and their ranks."""
    world, kind = session.world, session.device.type
    if options.shard_within == "world" or world.node_count == 1:
        # Not another group: torch makes one with NCCL beside Gloo if it sees GPUs, used or not.
        assert dist.group.WORLD is not None
        return DeviceMesh.from_group(dist.group.WORLD, kind, mesh_dim_names=("shard",))
    places = session.gather((world.node_rank, world.local_rank))
    nodes: list[list[int]] = [[] for _ in range(world.node_count)]
    for rank, (node, _) in sorted(enumerate(places), key=lambda each: each[1]):
        nodes[node].append(rank)
    sizes = [len(ranks) for ranks in nodes]
    if len(set(sizes)) > 1:
        raise ConfigurationError(
            "shard_within: node expects equally many ranks on each node, found "
            f"{', '.join(map(str, sizes))}: use --shard-within world"
        )
    return DeviceMesh(kind, torch.tensor(nodes), mesh_dim_names=("replicate", "shard"))


def _share_weights(module: nn.Module, device: torch.device) -> None:
    """Give all ranks rank 0's weights. At most one tensor at a time is on the device."""
    for tensor in (*module.parameters(), *module.buffers()):
        there = tensor.detach().to(device)
        dist.broadcast(there, 0)
        tensor.detach().copy_(there)


def count_bytes(module: nn.Module, passes: int) -> float:
    """Bytes that a rank sends in a step of ``passes`` forward and backward passes, as rings do.

    A group's parameters are gathered for each forward pass and for each backward pass; its
    gradients are reduced and scattered in the last one. Each of the three sends the rank's part
    once to each other rank. If nodes have copies, they average that part of the gradients.
    """
    total = 0.0
    for each in module.parameters():
        assert isinstance(each, DTensor)
        *copies, ranks = each.device_mesh.shape
        # Parts are equal: the first dimension is filled up to a multiple of the ranks.
        rows = -(-each.shape[0] // ranks)
        part = rows * math.prod(each.shape[1:]) * each.element_size()
        gathers, reductions = 2 * passes, int(each.requires_grad)
        total += (gathers + reductions) * (ranks - 1) * part
        for nodes in copies:
            total += reductions * 2 * (nodes - 1) / nodes * part
    return total


def _describe(mesh: DeviceMesh, counts: list[int]) -> str:
    copies = f", a copy on each of {mesh.size(0)} nodes" if mesh.ndim == 2 else ""
    return (
        f"Parameters: {sum(counts):,} sharded over {count_noun(mesh.size(-1), 'rank')}{copies}, in "
        f"{count_noun(len(counts), 'group')} of up to {max(counts):,}"
    )


@contextmanager
def hold_gradients(module: nn.Module) -> Iterator[None]:
    """Within it a backward pass adds to this rank's gradients, and ranks exchange none.

    They are whole, not sharded, meanwhile.
    """
    assert isinstance(module, FSDPModule)
    module.set_requires_gradient_sync(False)
    try:
        yield
    finally:
        module.set_requires_gradient_sync(True)

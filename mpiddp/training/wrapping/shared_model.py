"""One model on many ranks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from mpiddp.collectives.bootstrap import ensure_communicator
from mpiddp.launch.session import Session
from mpiddp.sync.ddp_hook import ScheduleHook, Synchronization, attach
from mpiddp.sync.parameter_server.server import UpdateRule
from mpiddp.sync.parameter_server.serving import Roles, Serving, assign_roles
from mpiddp.training.options.config import Configuration
from mpiddp.training.options.groups.parallelism import ParallelismOptions
from mpiddp.training.options.groups.synchronisation import FRAMEWORK, PARAMETER_SERVER, UNLIMITED
from mpiddp.training.step.divergence import MarkedModel
from mpiddp.training.step.weight_averaging import Mean


@dataclass(frozen=True)
class Replica:
    model: DistributedDataParallel
    hook: ScheduleHook | None
    """The hook that averages its gradients; None if DDP does."""
    marked: MarkedModel | None
    """What tells all ranks of a loss that is not finite; None if such a loss ends the run."""


def replicate(model: nn.Module, device: torch.device, configuration: Configuration) -> Replica:
    """Move the model to this rank's device and wrap it in DDP, over the default process group.

    DDP broadcasts rank 0's parameters now; in every backward pass gradients are averaged, as the
    configuration says. Raises ConfigurationError if they cannot be averaged that way.
    """
    model = model.to(device)
    marked = MarkedModel(model) if configuration.on_nan == "skip" else None
    inner = model if marked is None else marked
    devices = [device] if device.type != "cpu" else None
    wrapped = DistributedDataParallel(
        inner, device_ids=devices, bucket_cap_mb=find_cap(configuration),
        gradient_as_bucket_view=True,
        find_unused_parameters=configuration.find_unused_parameters,
    )  # fmt: skip
    hook = None
    if configuration.sync != FRAMEWORK:
        hook = attach(choose_synchronization(configuration), wrapped)
    return Replica(wrapped, hook, marked)


def find_cap(options: ParallelismOptions) -> float | None:
    """The size of DDP's buckets in MB. With None, DDP's own, the first one is smaller."""
    is_usual = options.bucket_mb == ParallelismOptions.bucket_mb
    return None if is_usual else options.bucket_mb


def share_buffers(model: nn.Module) -> None:
    """Give all ranks rank 0's buffers. Collective.

    DDP does so before each forward pass, but after the last one the running averages of ranks
    differ.
    """
    for buffer in model.buffers():
        dist.broadcast(buffer, 0)


def share_weights(module: nn.Module) -> None:
    """Give all ranks rank 0's parameters and buffers. Collective."""
    for parameter in module.parameters():
        dist.broadcast(parameter.detach(), 0)
    share_buffers(module)


def choose_mean(configuration: Configuration, device: torch.device) -> Mean:
    """How weights are averaged over all ranks. Raises ConfigurationError for what is not possible.

    Collective.
    """
    if configuration.sync == FRAMEWORK:
        return _average
    synchronization = choose_synchronization(configuration)
    on_gpu = device.type != "cpu"
    return ScheduleHook(synchronization, ensure_communicator(), on_gpu=on_gpu).average


def _average(tensor: torch.Tensor) -> float:
    """The bytes are those of a ring."""
    ranks = dist.get_world_size()
    dist.all_reduce(tensor.div_(ranks))
    return 2 * (ranks - 1) / ranks * tensor.nbytes


def find_roles(configuration: Configuration, ranks: int) -> Roles | None:
    """Who serves and who computes; None without parameter servers. Raises ConfigurationError."""
    if configuration.sync != PARAMETER_SERVER:
        return None
    dedicated = configuration.server_placement == "dedicated"
    return assign_roles(ranks, configuration.servers, dedicated=dedicated)


def find_bound(configuration: Configuration) -> int | None:
    """How many steps a worker may be ahead of the slowest; None for any number."""
    return None if configuration.staleness == UNLIMITED else int(configuration.staleness)


def serve(
    session: Session,
    roles: Roles,
    module: nn.Module,
    rule: UpdateRule,
    fail: Callable[[BaseException], object],
) -> Serving:
    """Have parameter servers hold the weights of a model, which is on this rank's device.

    All ranks have rank 0's weights from now on. ``fail`` is called with the error that ends a
    server's thread. Collective.
    """
    share_weights(module)
    return Serving(session, roles, module, rule, fail)


def choose_synchronization(configuration: Configuration) -> Synchronization:
    name = configuration.wire_dtype
    return Synchronization(
        configuration.sync,
        configuration.transport,
        None if name == "auto" else getattr(torch, name),
        configuration.overlap == "on",
    )

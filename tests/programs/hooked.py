"""DDP on the ranks of a pool, its gradients averaged in several ways.

Every way must lead to what plain DDP leads to, on the same samples, from the same parameters.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import mpiddp
import wrong_algorithms
from mistakes import hear
from mpiddp.sync.ddp_hook import Synchronization, attach, register_comm_hook

STEPS = 6
BUCKET_MEGABYTES = 0.05
"""Small ones, so that there are several."""


def make_model() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(40, 130), nn.Tanh(), nn.Linear(130, 130), nn.Linear(130, 7))


def train(rank: int, synchronization: Synchronization | None) -> tuple[torch.Tensor, dict]:
    """The trained parameters, flat; and what is to be said of the buckets."""
    model = DistributedDataParallel(
        make_model(),
        bucket_cap_mb=BUCKET_MEGABYTES,
        gradient_as_bucket_view=synchronization is not None,
    )
    hook = attach(synchronization, model) if synchronization is not None else None
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    samples = torch.Generator().manual_seed(rank)
    overlaps = set()
    for step in range(STEPS):
        if hook is not None and step == STEPS // 2:
            hook.overlap = not hook.overlap
        features = torch.randn(9, 40, generator=samples)
        labels = torch.randint(0, 7, (9,), generator=samples)
        loss = nn.functional.cross_entropy(model(features), labels)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        overlaps.add(None if hook is None else hook.overlap)
        optimizer.step()
    shared = {parameter.grad.is_shared() for parameter in model.parameters()}
    flat = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
    return flat, {"shared": sorted(shared), "overlaps": len(overlaps)}


def join_early(session: mpiddp.Session, ways: list[dict[str, Any]]) -> list[float]:
    """Rank 0 has one step, the others have all; how far each way leads from plain DDP."""
    rank = session.world.rank

    def train_uneven(way: dict[str, Any] | None) -> torch.Tensor:
        model = DistributedDataParallel(make_model(), bucket_cap_mb=BUCKET_MEGABYTES)
        if way is not None:
            assert register_comm_hook(model, **way) is model
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        samples = torch.Generator().manual_seed(rank)
        with model.join():
            for step in range(STEPS if rank > 0 else 1):
                optimizer.zero_grad(set_to_none=step % 2 == 0)
                model(torch.randn(9, 40, generator=samples)).square().mean().backward()
                optimizer.step()
        return nn.utils.parameters_to_vector(model.parameters()).detach()

    plain = train_uneven(None)
    return [float((train_uneven(way) - plain).abs().max()) for way in ways]


def refuse(session: mpiddp.Session) -> list[str]:
    model = DistributedDataParallel(make_model())
    alone, _ = torch.distributed.new_subgroups(1)
    calls: list[Callable[[], object]] = [
        lambda: register_comm_hook(model.module),  # type: ignore[arg-type]
        lambda: register_comm_hook(DistributedDataParallel(make_model(), process_group=alone)),
        lambda: register_comm_hook(model, "central"),
        lambda: register_comm_hook(model, wire_dtype="bfloat16"),  # type: ignore[arg-type]
        lambda: register_comm_hook(model, wire_dtype=torch.int32),
        lambda: register_comm_hook(register_comm_hook(model)),
        lambda: register_comm_hook(
            DistributedDataParallel(nn.Sequential(nn.Embedding(5, 3, sparse=True)))
        ),
    ]
    return list(map(hear, calls))


def differ(session: mpiddp.Session) -> str:
    """What is said of an algorithm of one's own whose owners of chunks are drawn on each rank."""
    model = DistributedDataParallel(make_model())
    with wrong_algorithms.registered():
        return hear(lambda: register_comm_hook(model, "drawn"))


def compare(session: mpiddp.Session, ways: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Train in each of ``ways``, arguments of a Synchronization; compare with plain DDP."""
    torch.set_num_threads(1)
    plain, _ = train(session.world.rank, None)
    reports = []
    for way in ways:
        name = way.get("wire_dtype")
        found, said = train(
            session.world.rank,
            Synchronization(**{**way, "wire_dtype": name and getattr(torch, name)}),
        )
        digest = session.gather(found.numpy().tobytes())
        difference = float((found - plain).abs().max() / plain.abs().max())
        reports.append({"same": len(set(digest)) == 1, "difference": difference, **said})
    return reports

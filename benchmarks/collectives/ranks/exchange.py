"""Messages between two ranks by torch.distributed, without MPI."""

from __future__ import annotations

import torch
from torch import distributed

from benchmarks.collectives.ranks.calls import CallSpec, Prepared


def prepare_exchange(
    spec: CallSpec, device: torch.device, group: distributed.ProcessGroup | None
) -> Prepared:
    """A message from rank 0 to rank 1 and back; or one in each direction at once."""
    rank = distributed.get_rank()
    other = 1 - rank
    source, target = (torch.zeros(spec.bytes, dtype=torch.uint8, device=device) for _ in range(2))

    def exchange() -> None:
        works = [
            distributed.isend(source, other, group=group),
            distributed.irecv(target, other, group=group),
        ]
        for work in works:
            assert work is not None, "this rank is in the group"
            work.wait()

    def lead() -> None:
        distributed.send(source, other, group=group)
        distributed.recv(target, other, group=group)

    def follow() -> None:
        distributed.recv(target, other, group=group)
        distributed.send(source, other, group=group)

    call = exchange if spec.is_mutual else (lead, follow)[rank]
    return Prepared(
        call,
        distributed.barrier,
        ran="send and receive" if spec.is_mutual else "send, receive",
        messages=1 if spec.is_mutual else 2,
        device=device if device.type == "cuda" else None,
    )

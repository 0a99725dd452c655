"""Calls functions on ranks of two nodes, from the shell of an allocation; prints what it found."""

from __future__ import annotations

import json
import os
import signal
import time

import torch
from torch import distributed

import mpiddp


def look(weights: torch.Tensor) -> tuple[str, float, torch.Tensor]:
    """The rank's node, a sum over the ranks, and a tensor that comes back changed."""
    session = mpiddp.init()
    total = torch.ones(1) * session.world.rank
    distributed.all_reduce(total)
    print("here is rank", session.world.rank)
    return session.world.hostname, float(total), weights.mul_(session.world.rank)


def end_rank(rank: int) -> None:
    """Kill one rank, while the others wait for it."""
    if mpiddp.init().world.rank == rank:
        os.kill(os.getpid(), signal.SIGKILL)
    distributed.barrier()


def main() -> None:
    found: dict[str, object] = {}
    weights = torch.arange(1 << 18, dtype=torch.float32)
    with mpiddp.ranks(nodes=2, per_node=2) as ranks:
        found["hosts"] = [member.host for member in ranks.members]
        rows = ranks.run(look, weights)
        found["seen"] = [(host, total) for host, total, _ in rows]
        found["equal"] = [torch.equal(row[2], weights * rank) for rank, row in enumerate(rows)]
        end = time.monotonic() + 60
        # A rank may still be about to wait for the next call.
        while "ranks 0-3" not in (stacks := ranks.stacks()) and time.monotonic() < end:
            time.sleep(0.1)
        found["stacks"] = stacks
        try:
            ranks.run(end_rank, 3)
        except mpiddp.RankFailedError as error:
            found["lost"] = {rank: str(each) for rank, each in error.by_rank.items()}
        ranks.restart()
        found["again"] = [host for host, *_ in ranks.run(look, weights)]
    print(json.dumps(found))


if __name__ == "__main__":
    main()

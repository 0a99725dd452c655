"""Calls functions on ranks of two nodes, from the shell of an allocation; prints what it found."""

import json
import os
import signal
import time

import numpy as np
import torch
from torch import distributed

import mpiddp


def look(weights: np.ndarray) -> tuple[str, float, np.ndarray]:
    """The rank's node, a sum over the ranks, and an array that comes back changed."""
    session = mpiddp.init()
    total = torch.ones(1) * session.world.rank
    distributed.all_reduce(total)
    print("here is rank", session.world.rank)
    return session.world.hostname, float(total), weights * session.world.rank


def end_rank(rank: int) -> None:
    """Kill one rank, while the others wait for it."""
    if mpiddp.init().world.rank == rank:
        os.kill(os.getpid(), signal.SIGKILL)
    distributed.barrier()


def main() -> None:
    found: dict[str, object] = {}
    weights = np.arange(1 << 18, dtype=np.float32)
    with mpiddp.ranks(nodes=2, per_node=1) as ranks:
        found["hosts"] = [member.host for member in ranks.members]
        rows = ranks.run(look, weights)
        found["seen"] = [(host, total) for host, total, _ in rows]
        found["equal"] = [bool((row[2] == weights * rank).all()) for rank, row in enumerate(rows)]
        end = time.monotonic() + 60
        # A rank may still be about to wait for the next call.
        while "ranks 0-1" not in (stacks := ranks.stacks()) and time.monotonic() < end:
            time.sleep(0.1)
        found["stacks"] = stacks
        try:
            ranks.run(end_rank, 1)
        except mpiddp.errors.RankFailedError as error:
            found["lost"] = {rank: str(each) for rank, each in error.by_rank.items()}
        ranks.restart()
        found["again"] = [host for host, *_ in ranks.run(look, weights)]
    print(json.dumps(found))


if __name__ == "__main__":
    main()

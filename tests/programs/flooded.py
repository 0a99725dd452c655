"""A rank that stops during start-up until a file ``NAME.go`` is there.

It does so when MPI is up, while the address agreement listens, and while the store and the
companion process listen. Arguments: the directory of such files, and the ports that mpiddp may
listen on. A rank that has stopped leaves ``NAME.held.RANK``.
"""

import resource
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as distributed

import mpiddp
from mpiddp.launch import phases
from mpiddp.launch.rendezvous import address_agreement
from mpiddp.lifeline.lifeline import Lifeline
from mpiddp.lifeline.membership import Membership

FILES = 1024
"""What most users may open."""


def main() -> None:
    folder, port_range = Path(sys.argv[1]), sys.argv[2]

    def hold(name: str, rank: int) -> None:
        (folder / f"{name}.held.{rank}").touch()
        while not (folder / f"{name}.go").exists():
            time.sleep(0.02)

    try_offers: Callable[..., Any] = address_agreement.try_offers
    begin, join = phases.begin_lifeline, Lifeline.join

    def begin_later(start_up: phases.StartUp, ranks: phases.JobRanks) -> Any:
        hold("mpi", ranks.world.rank)
        return begin(start_up, ranks)

    def try_offers_later(*offers: Any, **options: Any) -> Any:
        hold("address", 0)
        return try_offers(*offers, **options)

    def join_later(lifeline: Lifeline, membership: Membership | None = None) -> None:
        if membership is not None:
            hold("lifeline", membership.rank)
        join(lifeline, membership)

    phases.begin_lifeline = begin_later
    address_agreement.try_offers = try_offers_later
    Lifeline.join = join_later  # type: ignore[method-assign]
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (FILES, hard))
    with mpiddp.init(timeout=100, port_range=port_range) as session:
        size = session.world.size
        ones = torch.ones(1)
        distributed.all_reduce(ones)
        assert ones.item() == size
        # A group of its own: another question to torch's store.
        again = distributed.new_group(list(range(size)))
        distributed.all_reduce(ones, group=again)
        assert ones.item() == size * size
        assert mpiddp.all_reduce(torch.ones(3)).sum().item() == 3 * size


if __name__ == "__main__":
    main()

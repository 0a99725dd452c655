"""A program for the ranks of a job: rank 1 makes another call than the others. What comes of it?

    mpirun -n 3 python tests/programs/differences.py TRANSPORT…

Without MPIDDP_DEBUG each case has a communicator of its own, since what went wrong in one leaves
messages behind; for the same reason the job is ended with exit code 7 and not closed.
"""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import mpiddp
from mpiddp.errors import MpiddpError

ODD = 1
DEADLINE = 1.5
"""Seconds."""
DONE = 7

Report = list[Any]


def make_cases(transport: str) -> dict[str, Callable[[bool], torch.Tensor]]:
    """Calls by what differs in them; they are told whether they are the odd rank's."""

    def make(count: int) -> torch.Tensor:
        BUFFERS.append(torch.ones(count))
        return BUFFERS[-1]

    def reduce(count: int, op: str = "sum") -> torch.Tensor:
        return mpiddp.all_reduce(make(count), transport=transport, op=op)

    def broadcast(count: int) -> torch.Tensor:
        return mpiddp.broadcast(make(count), transport=transport)

    def in_order(odd: bool) -> torch.Tensor:
        counts = (1000, 60) if odd else (60, 1000)
        first, second = (reduce(count) for count in counts)
        return torch.cat((first, second))

    return {
        "small count": lambda odd: reduce(1001 if odd else 1000),
        "great count": lambda odd: reduce(200001 if odd else 200000),
        "operator": lambda odd: reduce(1000, op="max" if odd else "sum"), "order": in_order,
        "call": lambda odd: broadcast(1000) if odd else reduce(1000),
    }  # fmt: skip


BUFFERS: list[torch.Tensor] = []
"""Of calls that went wrong: neighbours may still work in them."""


def judge(call: Callable[[bool], torch.Tensor], odd: bool) -> Report:
    try:
        result = call(odd)
    except MpiddpError as error:
        return ["error", type(error).__name__, str(error)]
    return ["result", result.unique().tolist()]


def compare(session: mpiddp.Session, transport: str) -> dict[str, Any]:
    """The cases under MPIDDP_DEBUG: nothing is begun, so that nothing is left."""
    odd = session.world.rank == ODD
    report: dict[str, Any] = {
        name: judge(call, odd) for name, call in make_cases(transport).items()
    }
    report["good"] = mpiddp.all_reduce(torch.ones(5), transport=transport).tolist()
    return report


def main() -> None:
    report: dict[str, dict[str, Report]] = {}
    with mpiddp.init(timeout=60) as session:
        odd = session.world.rank == ODD
        # Start-up on a busy machine may take longer.
        session._timeout = DEADLINE
        for transport in sys.argv[1:]:
            report[transport] = {}
            for name, call in make_cases(transport).items():
                session.meet()
                session.collectives = None
                report[transport][name] = judge(call, odd)
        Path(f"{session.world.rank}.json").write_text(json.dumps(report))
        session.meet()
        raise SystemExit(DONE)


if __name__ == "__main__":
    main()

"""``python -m benchmarks allreduce``, and the other commands that measure collectives.

Every contender's result is checked before it is timed, and what counts of each iteration is its
slowest rank's time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import psutil

from benchmarks.judge.targets import Target
from benchmarks.measure.collectives.cells import CallGroup, CellMaker
from benchmarks.measure.collectives.contenders import list_blocks
from benchmarks.measure.collectives.options import (
    HAS_NOT,
    CollectiveRun,
    CollectivesPlan,
    PairsRun,
    check_memory,
    complete,
)
from benchmarks.measure.collectives.tables import format_run
from benchmarks.measure.collectives.targets import list_targets
from benchmarks.measure.collectives.visits import CallVisitor
from benchmarks.measure.engine import CellGroup, Quantity
from benchmarks.measure.launching.paired_jobs import start_jobs
from benchmarks.measure.launching.srun import Launcher, Srun
from benchmarks.records.collectives import COLLECTIVES
from benchmarks.records.contenders import ALL_PAIRS, ALL_REDUCE, MPI_JOB, POINT_TO_POINT, TORCH_JOB
from benchmarks.records.environment import resolve
from benchmarks.records.options import RunOptions, describe_algorithms
from benchmarks.records.schema import group_by

WORKER = "benchmarks.measure.collectives.ranks.worker"


def measure(plan: CollectivesPlan, launcher: Launcher) -> Iterator[CallGroup]:
    """Check and time all contenders of a plan, by number of ranks and size.

    An interruption (KeyboardInterrupt) is passed on after what was measured of the current size.
    Raises RunError, with a job's output, if one fails; ConfigurationError if the buffers do not fit
    into the memory of a node.
    """
    for ranks, each in list_runs(plan, launcher):
        yield from measure_run(ranks, each, plan)


def list_runs(plan: CollectivesPlan, launcher: Launcher) -> list[tuple[int, Launcher]]:
    """What is measured one after the other: numbers of ranks, and where.

    Point-to-point is measured between two ranks of a node, then, if there are several nodes,
    between two nodes.
    """
    if plan.quantity == POINT_TO_POINT and isinstance(launcher, Srun) and launcher.nodes > 1:
        return [(2, replace(launcher, nodes=1)), (2, launcher)]
    return [(ranks, launcher) for ranks in plan.ranks]


def measure_run(ranks: int, launcher: Launcher, plan: CollectivesPlan) -> Iterator[CallGroup]:
    """Of one number of ranks; the first and the last group say what holds for all of it."""
    nodes = launcher.nodes
    with start_jobs(WORKER, ranks, launcher, plan.deadline) as jobs:
        described = jobs[MPI_JOB].ask({"do": "describe"}, "describing")
        check_memory(plan, ranks, nodes or 1, min(each["free_bytes"] for each in described))
        if plan.busy:
            jobs[MPI_JOB].ask({"do": "be busy", "count": plan.busy}, "starting busy processes")
        if plan.load:
            files = list(map(resolve, plan.load))
            jobs[MPI_JOB].ask({"do": "load", "files": files}, "loading algorithms")
        places = [each["node"] for each in described]
        greeting = jobs[TORCH_JOB].greeting
        around = CallGroup(
            ranks=ranks,
            nodes=nodes,
            collectives=described[0],
            framework={name: greeting[name] for name in ("nccl", "gpu")},
        )
        yield around.state()
        visitor, maker = CallVisitor(jobs, plan, ranks), CellMaker(plan, around, places)
        blocks = list_blocks(plan, places, nccl=bool(around.framework["nccl"]))
        with visitor.watch(None, jobs, local=nodes is None) as find_share:
            for block in blocks:
                try:
                    visitor.visit_in_turns(visitor.admit(block))
                except KeyboardInterrupt:
                    yield maker.make(block, visitor)
                    raise
                yield maker.make(block, visitor)
            share = find_share()
        yield replace(around, first_calls=visitor.first_calls, others_share=share).state()


def tabulate(groups: Sequence[CellGroup], plan: CollectivesPlan) -> str:
    """Tables of each number of ranks, one after the other."""
    calls = (group for group in groups if isinstance(group, CallGroup))
    runs = group_by(calls, lambda group: (group.ranks, group.nodes)).values()
    return "\n\n".join(filter(None, (format_run(run, plan) for run in runs)))


def judge(groups: Sequence[CellGroup], plan: CollectivesPlan) -> list[Target]:
    cells = [cell for group in groups for cell in group.cells]
    return list_targets(cells, psutil.cpu_count(logical=False))


def make_quantity(command: str, quantity: str, run: type[Any] = CollectiveRun) -> Quantity[Any]:
    epilog = ""
    if "algorithms" not in HAS_NOT[quantity]:
        epilog = f"{describe_algorithms('ring:segments=4')} auto lets mpiddp choose. "
    return Quantity(
        command=command,
        description=f"Time {quantity} in turns, by size: the framework's, MPI's and mpiddp's.",
        epilog=f"{epilog}Sizes are powers of 2: 1K is 1024 bytes. A contender that cannot do what "
        "is asked for is left out of the table, with the reason.",
        without=("quantity", "probes", "rivals", *HAS_NOT[quantity]),
        on_cluster=True,
        plan=CollectivesPlan,
        run=run,
        complete=partial(complete, quantity),
        measure=measure,
        tabulate=tabulate,
        judge=judge,
    )


QUANTITIES = {
    "allreduce": make_quantity("allreduce", ALL_REDUCE),
    **{name: make_quantity(name, name) for name in COLLECTIVES if name != ALL_REDUCE},
    POINT_TO_POINT: make_quantity(POINT_TO_POINT, POINT_TO_POINT, RunOptions),
    ALL_PAIRS: make_quantity(ALL_PAIRS, ALL_PAIRS, PairsRun),
}
"""What each command measures."""

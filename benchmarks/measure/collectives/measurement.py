"""``python -m benchmarks allreduce``, and the other commands that measure collectives.

Every contender's result is checked before it is timed, and what counts of each iteration is its
slowest rank's time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import chain

import psutil

from benchmarks.measure.checks import check_run
from benchmarks.measure.collectives.cells import (
    CallSurroundings,
    CellMaker,
    Finding,
    keep,
    list_wrong,
)
from benchmarks.measure.collectives.contenders import list_blocks
from benchmarks.measure.collectives.options import CollectivesPlan, check_algorithms, parse
from benchmarks.measure.collectives.tables import format_findings
from benchmarks.measure.collectives.targets import judge
from benchmarks.measure.collectives.visits import CallVisitor
from benchmarks.measure.launching.launchers import Mpirun
from benchmarks.measure.launching.paired_jobs import start_jobs
from benchmarks.measure.launching.srun import Launcher, Srun
from benchmarks.measure.trials import WrongResultError
from benchmarks.records.contenders import (
    ALL_PAIRS,
    ALL_REDUCE,
    MPI_JOB,
    POINT_TO_POINT,
    TORCH_JOB,
)
from benchmarks.records.environment import resolve
from benchmarks.records.options import RunOptions
from benchmarks.show.results import open_output
from mpiddp.errors import ConfigurationError
from mpiddp.wording import describe_size

WORKER = "benchmarks.measure.collectives.ranks.worker"


def main(command: str, arguments: Sequence[str]) -> None:
    """Measure, record, print and draw; also what was measured before an interruption."""
    options = parse(command, arguments)
    launcher, plan = check(options), options.plan
    runs: list[list[Finding]] = []
    with open_output(command, options, launcher) as output:
        try:
            for ranks, each in list_runs(plan, launcher):
                runs.append([])
                keep(measure(ranks, each, plan), runs[-1], output.record)
        finally:
            cells, cores = output.record.cells, output.environment["cores"]
            texts = [format_findings(run, plan) for run in runs if len(run) > 1]
            output.show(*texts, targets=judge(cells, cores) if options.targets else ())
    if wrong := list(list_wrong(chain.from_iterable(runs))):
        raise WrongResultError(f"wrong results: {'; '.join(wrong)}")


def check(options: RunOptions[CollectivesPlan]) -> Launcher:
    """Refuse what cannot be measured, before anything is started; returns the launcher."""
    plan = options.plan
    if plan.quantity == ALL_REDUCE:
        check_algorithms(plan)
    launcher = check_run(options, plan.ranks, link=plan.link)
    if isinstance(launcher, Mpirun):
        check_memory(plan, max(plan.ranks), 1, psutil.virtual_memory().available)
    return launcher


def list_runs(plan: CollectivesPlan, launcher: Launcher) -> list[tuple[int, Launcher]]:
    """What is measured one after the other: numbers of ranks, and where.

    Point-to-point is measured between two ranks of a node, then, if there are several nodes,
    between two nodes.
    """
    if plan.quantity == POINT_TO_POINT and isinstance(launcher, Srun) and launcher.nodes > 1:
        return [(2, replace(launcher, nodes=1)), (2, launcher)]
    return [(ranks, launcher) for ranks in plan.ranks]


def measure(ranks: int, launcher: Launcher, plan: CollectivesPlan) -> Iterator[Finding]:
    """Check and time all contenders of a plan; yields what is found as each size is done.

    It is what the commands measure by, and others may: ``options.finish(CollectivesPlan(quantity=…,
    sizes=((4096,), (65536,)), algorithms=("auto", "ring"), transports=("auto",),
    buffers=("private",)))`` is a plan; what a field does is said there. ``measure`` yields
    `CallSurroundings`, then a `Cell` for each contender that was timed, and a `Refusal` for each
    one that cannot do that or does it wrongly; at the end `CallSurroundings` again. An interruption
    (KeyboardInterrupt) is passed on after what was measured of the current size.

    Args:
        ranks: over all nodes; point-to-point takes 2.
        launcher: from ``checks.check_run``; an `Srun` knows the nodes.

    Raises RunError, with a job's output, if one fails; ConfigurationError if the buffers do not fit
    into the memory of a node.
    """
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
        surroundings = CallSurroundings(
            ranks=ranks,
            nodes=nodes,
            collectives=described[0],
            framework={name: greeting[name] for name in ("nccl", "gpu")},
        )
        yield surroundings
        visitor, maker = CallVisitor(jobs, plan, ranks), CellMaker(plan, ranks, places)
        blocks = list_blocks(plan, places, nccl=bool(surroundings.framework["nccl"]))
        with visitor.watch(None, jobs, local=nodes is None) as find_share:
            for block in blocks:
                try:
                    visitor.visit_in_turns(visitor.admit(block))
                except KeyboardInterrupt:
                    yield from maker.make(block, visitor)
                    raise
                yield from maker.make(block, visitor)
            share = find_share()
        yield replace(surroundings, first_calls=visitor.first_calls, others_share=share)


def check_memory(plan: CollectivesPlan, ranks: int, nodes: int, free: int) -> None:
    """Raise ConfigurationError if the buffers of the largest size do not fit into a node's memory.

    ``free``: bytes of the node with the least. Beside mpiddp's buffers there are a stage and
    scratch space, the ring's, and, in the other job, the framework's and Gloo's own.
    """
    most = max(plan.bytes)
    copies = len(plan.buffers) + 5 if plan.quantity not in (ALL_PAIRS, POINT_TO_POINT) else 8
    needed = ranks // nodes * copies * most
    if needed > free:
        raise ConfigurationError(
            f"--sizes: {describe_size(most)} on {ranks // nodes} ranks of a node needs "
            f"{describe_size(needed)} of memory ({copies} buffers for each rank), but "
            f"{describe_size(free)} are free: give smaller sizes, or fewer ranks"
        )

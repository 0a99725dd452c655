"""Ask the ranks which contenders can run, then time those in turns, size by size."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product

from benchmarks.measure.collectives.cells import CellMaker
from benchmarks.measure.collectives.findings import Finding, Surroundings
from benchmarks.measure.collectives.options import Plan
from benchmarks.measure.collectives.visits import Visitor
from benchmarks.measure.launching.paired_jobs import start_jobs
from benchmarks.measure.launching.srun import Launcher
from benchmarks.records import contenders
from benchmarks.records.collectives import ITEM_BYTES
from benchmarks.records.contenders import (
    ALL_PAIRS,
    MPI,
    MPI_JOB,
    OWN,
    POINT_TO_POINT,
    REDUCING,
    REDUCTION,
    TORCH_JOB,
    Contender,
    Task,
)
from benchmarks.records.environment import resolve
from mpiddp.errors import ConfigurationError
from mpiddp.wording import describe_size


def measure(ranks: int, launcher: Launcher, plan: Plan) -> Iterator[Finding]:
    """Check and time all contenders of a plan; yields what is found as each size is done.

    It is what the commands measure by, and others may: ``options.finish(Plan(quantity=…,
    sizes=((4096,), (65536,)), algorithms=("auto", "ring"), transports=("auto",),
    buffers=("private",)))`` is a plan; what a field does is said there. ``measure`` yields
    `Surroundings`, then a `records.Cell` for each contender that was timed, and a `Refusal` for
    each one that cannot do that or does it wrongly; at the end `Surroundings` again. An
    interruption (KeyboardInterrupt) is passed on after what was measured of the current size.

    Args:
        ranks: over all nodes; point-to-point takes 2.
        launcher: from ``checks.check_run`` or ``check_start``; an `Srun` knows the nodes.

    Raises RunError, with a job's output, if one fails; ConfigurationError if the buffers do not fit
    into the memory of a node.
    """
    nodes = launcher.nodes
    with start_jobs(contenders.WORKER, ranks, launcher, plan.deadline) as jobs:
        described = jobs[MPI_JOB].ask({"do": "describe"}, "describing")
        check_memory(plan, ranks, nodes or 1, min(each["free_bytes"] for each in described))
        if plan.busy:
            jobs[MPI_JOB].ask({"do": "be busy", "count": plan.busy}, "starting busy processes")
        if plan.load:
            files = list(map(resolve, plan.load))
            jobs[MPI_JOB].ask({"do": "load", "files": files}, "loading algorithms")
        places = [each["node"] for each in described]
        greeting = jobs[TORCH_JOB].greeting
        surroundings = Surroundings(
            ranks=ranks,
            nodes=nodes,
            collectives=described[0],
            framework={name: greeting[name] for name in ("nccl", "gpu")},
        )
        yield surroundings
        visitor, maker = Visitor(jobs, plan, ranks), CellMaker(plan, ranks, places)
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


def check_memory(plan: Plan, ranks: int, nodes: int, free: int) -> None:
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


def list_blocks(plan: Plan, places: Sequence[int], *, nccl: bool) -> list[list[Task]]:
    """What is measured in turns: the probes, then the tasks of each size, type and operator.

    ``places``: the node of each rank.
    """
    probes = contenders.list_probes(machine=plan.probes, link=plan.link)
    if plan.quantity == ALL_PAIRS:
        ends = _find_ends(places)
        who, rounds = Contender(MPI, quantity=ALL_PAIRS), contenders.list_rounds(ends)
        return [[Task(who, size, "uint8", pairs=each) for each in rounds] for size in plan.bytes]
    if plan.quantity == POINT_TO_POINT:
        rows = contenders.list_messengers(plan.transports, nccl=nccl)
        return [_list_messages(rows, size) for size in plan.bytes]
    blocks = [probes] if probes else []
    for size, kind, operator in product(plan.bytes, plan.types, plan.operators):
        block = []
        for quantity in _list_quantities(plan):
            block += [
                Task(row, size, kind, operator if quantity in REDUCING else "")
                for row in contenders.list_contenders(
                    quantity, plan.algorithms, plan.transports, plan.buffers, nccl=nccl
                )
                if plan.rivals or row.maker == OWN
            ]
        blocks.append(block)
    return blocks


def _list_quantities(plan: Plan) -> list[str]:
    """What is measured together: with guidelines, what it can be replaced by, too."""
    own = plan.quantity
    if not plan.guidelines:
        return [own]
    parts = [each for parts in contenders.PARTS.get(own, ()) for each in parts]
    if own in contenders.SUBSTITUTES:
        parts.append(contenders.SUBSTITUTES[own])
    return [own, *parts]


def _list_messages(rows: Sequence[Contender], size: int) -> list[Task]:
    """One way and both ways, and an addition, which needs whole elements."""
    tasks = [Task(row, size, "uint8", is_mutual=mutual) for row in rows for mutual in (False, True)]
    if size % ITEM_BYTES["float32"] == 0:
        tasks.append(Task(Contender(MPI, quantity=REDUCTION), size, "float32", "sum"))
    return tasks


def _find_ends(places: Sequence[int]) -> list[int]:
    """The first rank of each node; all ranks, if there is one node."""
    nodes = sorted(set(places))
    return [places.index(node) for node in nodes] if len(nodes) > 1 else list(range(len(places)))

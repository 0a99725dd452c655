"""Who takes part: the contenders of each quantity, and the tasks that take turns."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product

from benchmarks.measure.collectives.options import CollectivesPlan
from benchmarks.records.collectives import ITEM_BYTES
from benchmarks.records.contenders import (
    ALL_PAIRS,
    ALL_REDUCE,
    BACKEND,
    BOUND_BYTES,
    COPIES,
    EMPTY,
    GLOO,
    GPU,
    LINK,
    LINK_BYTES,
    MPI,
    MPI_JOB,
    NCCL,
    OWN,
    PARTS,
    PEER_BYTES,
    PEER_READ,
    PERSISTENT,
    POINT_TO_POINT,
    PREPARED,
    PRIVATE,
    PROBE,
    REDUCING,
    REDUCTION,
    RING,
    SUBSTITUTES,
    TORCH_JOB,
    Contender,
    Task,
)

Pairs = tuple[tuple[int, int], ...]
"""Ranks that send, and ranks that receive."""


def list_blocks(plan: CollectivesPlan, places: Sequence[int], *, nccl: bool) -> list[list[Task]]:
    """What is measured in turns: the probes, then the tasks of each size, type and operator.

    ``places``: the node of each rank.
    """
    if plan.quantity == ALL_PAIRS:
        who, rounds = Contender(MPI, quantity=ALL_PAIRS), list_rounds(_find_ends(places))
        return [[Task(who, size, "uint8", pairs=each) for each in rounds] for size in plan.bytes]
    if plan.quantity == POINT_TO_POINT:
        rows = list_contenders(POINT_TO_POINT, plan, nccl=nccl)
        return [list(_list_messages(rows, size)) for size in plan.bytes]
    rows = [
        row
        for quantity in _list_quantities(plan)
        for row in list_contenders(quantity, plan, nccl=nccl)
        if plan.rivals or row.maker == OWN
    ]
    blocks = [
        [Task(row, size, kind, operator if row.quantity in REDUCING else "") for row in rows]
        for size, kind, operator in product(plan.bytes, plan.types, plan.operators)
    ]
    probes = list_probes(machine=plan.probes, link=plan.link)
    return [probes, *blocks] if probes else blocks


def _list_quantities(plan: CollectivesPlan) -> list[str]:
    """What is measured together: with guidelines, what it can be replaced by, too."""
    own = plan.quantity
    if not plan.guidelines:
        return [own]
    parts = [each for parts in PARTS.get(own, ()) for each in parts]
    return [own, *parts, *([SUBSTITUTES[own]] if own in SUBSTITUTES else [])]


def list_contenders(quantity: str, plan: CollectivesPlan, *, nccl: bool) -> list[Contender]:
    """All rows of a collective or of messages, the framework's first."""
    others = [Contender(GLOO, TORCH_JOB), *([Contender(NCCL, TORCH_JOB, buffer=GPU)] * nccl)]
    others.append(Contender(MPI))
    if quantity == POINT_TO_POINT:
        own = [Contender(OWN, transport=transport) for transport in plan.transports]
        return [replace(each, quantity=quantity) for each in others + own]
    has_private = PRIVATE in plan.buffers
    if "auto" in plan.algorithms and "auto" in plan.transports and has_private:
        others.append(Contender(BACKEND, TORCH_JOB))
    own = [
        Contender(OWN, MPI_JOB, *each)
        for each in product(plan.algorithms, plan.transports, plan.buffers)
    ]
    if quantity == ALL_REDUCE:
        others += [Contender(maker) for maker in (RING, PERSISTENT)]
        # As MPI_Allreduce and the plain rings, whose arguments are put together beforehand too.
        own += [
            Contender(PREPARED, MPI_JOB, algorithm, transport)
            for algorithm, transport in (("auto", "auto"), ("ring", "mpi"))
            if algorithm in plan.algorithms and transport in plan.transports and has_private
        ]
    return [replace(each, quantity=quantity) for each in others + own]


def list_probes(*, machine: bool, link: bool) -> list[Task]:
    """What is asked of the machine itself, and of the harness."""
    sizes = {**dict.fromkeys(COPIES, BOUND_BYTES), PEER_READ: PEER_BYTES, EMPTY: 0}
    chosen = {**(sizes if machine else {}), **({LINK: LINK_BYTES} if link else {})}
    return [Task(Contender(name, quantity=PROBE), size, "uint8") for name, size in chosen.items()]


def _list_messages(rows: Sequence[Contender], size: int) -> Iterator[Task]:
    """One way and both ways, and an addition, which needs whole elements."""
    for row, is_mutual in product(rows, (False, True)):
        yield Task(row, size, "uint8", is_mutual=is_mutual)
    if size % ITEM_BYTES["float32"] == 0:
        yield Task(Contender(MPI, quantity=REDUCTION), size, "float32", "sum")


def _find_ends(places: Sequence[int]) -> Sequence[int]:
    """The first rank of each node; all ranks, if there is one node."""
    nodes = sorted(set(places))
    return [places.index(node) for node in nodes] if len(nodes) > 1 else range(len(places))


def list_rounds(ends: Sequence[int]) -> list[Pairs]:
    """Rounds of disjoint ordered pairs, in which each pair of ranks meets once in each direction.

    The circle method of tournaments: one stays, the others move on by a place each round.
    """
    circle: list[int | None] = [*ends, *([None] * (len(ends) % 2))]
    rounds: list[Pairs] = []
    half = len(circle) // 2
    for _ in range(len(circle) - 1):
        met = [
            (one, other)
            for one, other in zip(circle[:half], reversed(circle[half:]), strict=True)
            if one is not None and other is not None
        ]
        rounds += [tuple(met), tuple((other, one) for one, other in met)]
        circle[1:] = [circle[-1], *circle[1:-1]]
    return rounds

"""The closed form of each algorithm on ``nodes`` nodes of ``each`` ranks; None if none is known.

All of them hold if all links are alike, that is, on one node or with one rank on each; the
docstrings say when else.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from mpiddp.schedules.cost import NOTHING, Load, Phase, exchange_phase, make_phase
from mpiddp.schedules.pairs import (
    count_steps,
    find_last_steps,
    fold_ranks,
    list_bine_edges,
    list_partners,
    list_pat_steps,
)
from mpiddp.schedules.registry import check_servers, find_inner, find_outer

LARGEST_NODE = 256
"""Ranks on a node for which the inner level's owners are counted, by making its schedule."""


def ring(nodes: int, each: int) -> list[Phase]:
    """Each step sends a message over the slowest link of the ring; any nodes."""
    n = nodes * each
    beside = Load(1, 1 / n) if nodes > 1 and each > 1 else NOTHING
    phases = [make_phase(n - 1, nodes, 1, 1 / n, added) for added in (1 / n, 0.0)]
    return [replace(phase, beside=beside) for phase in phases]


def naive_ring(nodes: int, each: int) -> list[Phase]:
    """One hop in each step, some of them between nodes; any nodes."""
    near, far = nodes * (each - 1), nodes - 1
    # The way round begins with the hop that closes the ring, and leaves out the last one.
    back = (near - 1, far + 1) if nodes > 1 and each > 1 else (near, far)
    return [
        make_phase(near, 1, 1, 1, added=1),
        make_phase(far, nodes, 1, 1, added=1),
        make_phase(back[0], 1, 1, 1),
        make_phase(back[1], nodes, 1, 1),
    ]


def recursive_doubling(nodes: int, each: int) -> list[Phase] | None:
    """All ranks of a node swap with another node at once; 2^k nodes of 2^j ranks."""
    if (rounds := _count_rounds(nodes, each)) is None:
        return None
    near, far, spare = rounds
    return [
        make_phase(spare, nodes, 1, 1, added=1),
        Phase(near, near=Load(1, 1), added=1),
        Phase(far, far=Load(1, 1), link=each, added=1),
        make_phase(spare, nodes, 1, 1),
    ]


def halving_doubling(nodes: int, each: int) -> list[Phase] | None:
    """The large halves go between nodes; 2^k nodes of 2^j ranks."""
    if (rounds := _count_rounds(nodes, each)) is None:
        return None
    near, far, spare = rounds
    phases = []
    for added in (1, 0):
        phases.append(make_phase(spare, nodes, 1, 1, added))
        for halving in range(1, near + far + 1):
            part = 0.5**halving
            if halving <= far:
                phases.append(Phase(1, NOTHING, Load(1, part), each * part, added * part))
            else:
                phases.append(Phase(1, Load(1, part), added=added * part))
    return phases


def binomial_tree(nodes: int, each: int) -> list[Phase] | None:
    """Nodes of 2^j ranks have a tree each, and their first ranks one of their own."""
    if nodes > 1 and not _is_power(each):
        return None
    near, far = (each - 1).bit_length(), (nodes - 1).bit_length()
    return [
        phase
        for added in (1, 0)
        for phase in (make_phase(near, 1, 1, 1, added), make_phase(far, nodes, 1, 1, added))
    ]


def double_tree(nodes: int, each: int) -> list[Phase] | None:
    """Only if all links are alike."""
    n = nodes * each
    if nodes > 1 and each > 1:
        return None
    # A parent has two children, except for the root of 2^k ranks, which has one.
    height, single = n.bit_length() - 1, 1 if _is_power(n) and n > 1 else 0
    return [
        phase
        for added in (1, 0)
        for phase in (
            make_phase(height - single, nodes, 2, 1, added),
            make_phase(single, nodes, 1, 1 / 2, added / 2),
        )
    ]


def one_shot(nodes: int, each: int) -> list[Phase]:
    """All to every rank; any nodes."""
    return [exchange_phase(nodes, each, 1, added=nodes * each - 1)]


def direct(nodes: int, each: int, servers: int | None = None) -> list[Phase] | None:
    """A chunk to every rank; with fewer servers than ranks, if they are all on one node."""
    n = nodes * each
    check_servers(n, n if servers is None else servers, dedicated=False)
    if servers is not None and servers < n:
        return _serve_beside(nodes, each, servers)
    share = 1 / n
    return [exchange_phase(nodes, each, share, added) for added in ((n - 1) * share, 0.0)]


def central(nodes: int, each: int, servers: int = 1) -> list[Phase] | None:
    """At least as many workers as servers, and servers that fit on the last node."""
    check_servers(nodes * each, servers, dedicated=nodes * each > 1)
    others, workers = (nodes - 1) * each, nodes * each - servers
    if nodes * each == 1:
        return []
    if workers < servers or (nodes > 1 and 1 < each < servers):
        return None
    if nodes == 1 or each == 1:
        return _serve(servers, *((workers, 0) if nodes == 1 else (0, workers)))
    return _serve(servers, each - servers, others, others)


def two_level(
    nodes: int, each: int, inner: str = "direct", outer: str = "ring"
) -> list[Phase] | None:
    """The outer algorithm on each of the rails, which share the node's link."""
    inner_level, outer_level = find_inner(inner), find_outer(outer)
    if each > LARGEST_NODE:
        return None
    within, across = inner_level.phases(1, each), outer_level.phases(nodes, 1)
    if within is None or across is None:
        return None
    rails = len(set(inner_level.make(each).owners))
    shared = [
        replace(
            phase,
            far=phase.far.scaled(1, 1 / rails),
            link=phase.far.volume,
            added=phase.added / rails,
        )
        for phase in across
    ]
    middle = len(within) // 2
    return [*within[:middle], *shared, *within[middle:]]


def gather_broadcast(nodes: int, each: int) -> list[Phase] | None:
    """One server, on rank 0; any nodes."""
    return _serve_beside(nodes, each, servers=1)


def pat(nodes: int, each: int, aggregation: int | None = None) -> list[Phase]:
    """All ranks send as far, so that ``near`` of a node's messages leave it; any nodes."""
    n = nodes * each
    steps = [
        (min(near, n - near, each), len(offsets) / n)
        for near, offsets in list_pat_steps(n, aggregation)
    ]
    return [_send(nodes, *step, added) for added in (1, 0) for step in steps]


def swing(nodes: int, each: int, variant: str = "bandwidth") -> list[Phase] | None:
    """Any nodes; with an odd number of ranks, one of which is busier, only ``latency``."""
    n = nodes * each
    if variant == "latency":
        core, spare = fold_ranks(n, kept=1)
        swaps = [(_swap(core, step), 1.0) for step in range(count_steps(len(core)))]
        steps = [*([(spare, 1.0)] if spare else []), *swaps]
        return _meet_all(nodes, each, steps, there=len(steps), back=len(steps) - len(swaps))
    if n % 2 and n > 1:
        return None
    sent = Counter(find_last_steps(n).values())
    steps = [(_swap(range(n), step), sent[step] / n) for step in range(count_steps(n))]
    return _meet_all(nodes, each, steps, there=len(steps), back=len(steps))


def bine(nodes: int, each: int, variant: str = "tree") -> list[Phase] | None:
    """Unless more messages leave some node in a step than arrive at any, to be added."""
    core, spare = fold_ranks(nodes * each, kept=0)
    if variant == "butterfly":
        halves = range(count_steps(len(core)))
        steps = [(_swap(core, step), 0.5 ** (step + 1)) for step in halves]
    else:
        edges = list_bine_edges(len(core))
        steps = [([(core[r], core[parent]) for r, parent in step], 1.0) for step in edges]
    steps = [*([(spare, 1.0)] if spare else []), *steps]
    return _meet_all(nodes, each, steps, there=len(steps), back=len(steps))


_Pairs = Sequence[tuple[int, int]]


def _swap(core: Sequence[int], step: int) -> _Pairs:
    return [(core[r], core[other]) for r, other in enumerate(list_partners(len(core), step))]


def _meet_all(
    nodes: int, each: int, steps: Sequence[tuple[_Pairs, float]], there: int, back: int
) -> list[Phase] | None:
    """The first steps ``there``, in which all is added, and ``back``, in which it is copied.

    A step consists of sources and destinations, and the share of the buffer in each message. None
    if it is not the busiest link's messages that are added.
    """
    first, second = [], []
    for place, (pairs, share) in enumerate(steps):
        source, target = np.array(pairs).T // each
        far = source != target
        leaving, arriving = (
            int(np.bincount(node[far], minlength=1).max()) for node in (source, target)
        )
        if place < there and leaving > arriving:
            return None
        crossing = max(leaving, arriving)
        first += [_send(nodes, crossing, share, 1)] if place < there else []
        second += [_send(nodes, crossing, share, 0)] if place < back else []
    return [*first, *second]


def _send(nodes: int, crossing: int, share: float, added: int) -> Phase:
    """A message of ``share`` of the buffer each; ``crossing`` leave the busiest node."""
    if nodes == 1 or not crossing:
        return Phase(1, Load(1, share), added=added * share)
    return Phase(1, NOTHING, Load(1, share), crossing * share, added * share)


def _count_rounds(nodes: int, each: int) -> tuple[int, int, int] | None:
    """Rounds of swaps within nodes and between them, and of the spare ranks."""
    if nodes > 1 and each > 1 and (not _is_power(nodes) or not _is_power(each)):
        return None
    return each.bit_length() - 1, nodes.bit_length() - 1, 0 if _is_power(nodes * each) else 1


def _is_power(n: int) -> bool:
    return n & (n - 1) == 0


def _serve(servers: int, near: int, far: int, link: int = 0) -> list[Phase]:
    """Each server serves ``near`` workers of its own node, and ``far`` others."""
    share = 1 / servers
    steps, added_up = (1 if near + far else 0), (near + far) * share
    loads = Load(near, near * share), Load(far, far * share)
    return [Phase(steps, *loads, link, added) for added in (added_up, 0.0)]


def _serve_beside(nodes: int, each: int, servers: int) -> list[Phase] | None:
    """For servers on one node, or one rank on each."""
    others, layered = (nodes - 1) * each, nodes > 1 and each > 1
    if layered and servers > each:
        return None
    return _serve(servers, each - 1, others, others if layered else 0)

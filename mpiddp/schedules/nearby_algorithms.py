"""Algorithms that send much to near ranks and little to far ones: PAT, Swing and Bine trees.

Ranks with neighbouring numbers are near: on one node, one switch, or the next place of a torus.
Recursive halving sends half of the buffer half way round and saves its short messages for
neighbours; these do the reverse, so that few bytes share the long links. The docstrings use the
letters of ``algorithms``.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Literal

from mpiddp.schedules import formulas
from mpiddp.schedules.algorithms import add, fold, swap_all
from mpiddp.schedules.pairs import (
    count_steps,
    find_last_steps,
    find_place,
    list_bine_edges,
    list_partners,
    list_pat_steps,
)
from mpiddp.schedules.registry import register
from mpiddp.schedules.schedule import Schedule, Transfer, gather_back, scatter


def add_all(src: int, dst: int, chunks: Collection[int]) -> list[Transfer]:
    """``src`` sends these chunks, which ``dst`` adds to its own; neighbours in one transfer."""
    firsts = sorted(chunk for chunk in chunks if chunk - 1 not in chunks)
    ends = sorted(chunk + 1 for chunk in chunks if chunk + 1 not in chunks)
    return [add(src, dst, lo, hi) for lo, hi in zip(firsts, ends, strict=True)]


# ---- PAT ----------------------------------------------------------------------------------


@register("pat", formulas.pat)
def pat(n: int, aggregation: int | None = None) -> Schedule:
    """Every chunk is summed along a binomial tree of its own; the trees share their messages.

    In the tree of chunk c rank c + s sends to c + s − 2^i, where 2^i is the lowest set bit of s. So
    near ranks send first, when there is most to send: Bruck's all-gather, its dimensions
    reversed, played backwards. A rank packs into one message what it sends in a step for several
    trees. With ``aggregation=A`` these are at most A chunks (a power of two below it): the first
    steps serve A trees each, in turns; the last lg A steps halve their number.
    2⌈lg n⌉ steps; bytes 2(n−1)/n·S; 2⌈lg n⌉α + 2(n−1)/n·Sβ + (n−1)/n·Sγ for any n. On 2^k ranks
    aggregation A takes 2(n/A − 1 + lg A) steps. Halves; rank r owns chunk r. Extra buffer: twice
    the longest message, which has ⌊n/2⌋ chunks, or A: one is packed, one arrives. Jeaugey, arXiv
    2506.20252, and NCCL's ``src/include/collectives.h``. Departures: the all-gather is the mirror
    image of the reduce-scatter (NCCL's takes the trees in another order, which needs fewer
    intermediate buffers), and what is passed on is kept in its place, so that only messages need
    buffers.
    """
    steps = [
        [t for r in range(n) for t in add_all(r, (r - near) % n, {(r - s) % n for s in offsets})]
        for near, offsets in list_pat_steps(n, aggregation)
    ]
    return gather_back(scatter(n, steps, owners=range(n), packed=True))


# ---- Swing --------------------------------------------------------------------------------


@register("swing", formulas.swing)
def swing(n: int, variant: Literal["bandwidth", "latency"] = "bandwidth") -> Schedule:
    """Halving in which partners are 1, 1, 3, 5, 11, … apart, now on one side, now on the other.

    In step s an even rank r talks to r + ρ(s), an odd one to r − ρ(s), ρ(s) = (1 − (−2)^(s+1))/3:
    on a ring or a torus a third less far than 2^s. Each sends the chunks that the partner can bring
    to their owners in the steps to come, packed.
    2⌈lg n⌉ steps; bytes 2(n−1)/n·S; 2⌈lg n⌉α + 2(n−1)/n·Sβ + (n−1)/n·Sγ for even n. If n is odd,
    the last rank stands aside: it swaps one chunk with each of the others, with as many in a step
    as they send chunks, in n − 1 messages. Halves; rank r owns chunk r. Extra buffer: up to S, half
    of it to pack, and 3/2·S for odd n. ``variant=latency`` exchanges whole buffers in lg n steps,
    with the price and the spare ranks of recursive doubling; no halves. De Sensi et al., NSDI'24
    (arXiv 2401.09356). Departures: a torus of one dimension and one port (there a buffer is cut in
    parts that start in different directions, one for each port); and ``latency`` takes the steps in
    the reverse order, since in the published one ranks add in different orders and, from eight
    ranks on, may differ in the last bits.
    """
    if variant == "latency":
        return swap_all(n, 1, list_swings)
    even, aside = n // 2 * 2, n % 2 * (n > 1)
    last = find_last_steps(even)
    steps = []
    for step in range(count_steps(even)):
        sent = [chunk for chunk, when in last.items() if when == step]
        partners = list_partners(even, step)
        transfers = []
        for r, partner in enumerate(partners):
            side = -1 if r % 2 else 1
            transfers += add_all(r, partner, {(r + side * chunk) % even for chunk in sent})
        if aside:
            # No step sends chunk 0, rank 0's own: the two swap in the last step.
            others = [*sent, *([0] if step == count_steps(even) - 1 else [])]
            transfers += [add(n - 1, other, other) for other in others]
            transfers += [add(other, n - 1, n - 1) for other in others]
        steps.append(transfers)
    return gather_back(scatter(n, steps, owners=range(n), packed=True))


def list_swings(size: int) -> list[list[int]]:
    """Swing's partners of 2^k ranks, the last step's first."""
    return [list_partners(size, step) for step in reversed(range(count_steps(size)))]


# ---- Bine trees ---------------------------------------------------------------------------


@register("bine", formulas.bine)
def bine(n: int, variant: Literal["tree", "butterfly"] = "tree") -> Schedule:
    """Reduce along a binomial tree whose edges are 1, 1, 3, 5, 11, … long, and broadcast back.

    A rank's number is read to the base −2. After step s those go on whose lowest s + 2 digits are
    equal: they receive from the partner |ρ(s)| ranks away (Swing's). So a subtree lies on both
    sides of its root, and fewer bytes leave a group of neighbours than in a binomial tree.
    2⌈lg n⌉ steps; bytes ⌈lg n⌉·S (the root's); 2⌈lg n⌉(α + Sβ) + ⌈lg n⌉Sγ. Halves (a reduce to rank
    0). Extra buffer: S. If n is no power of two, spare ranks first give theirs to a neighbour.
    ``variant=butterfly`` makes a reduce-scatter and an all-gather of the same pairs, whose chunks
    are ordered so that each message is one piece: the steps and the price of halving-doubling, with
    its spare ranks. De Sensi et al., SC'25 (arXiv 2508.17311), and HLC-Lab's ``libbine``, whose
    trees are for powers of two, and whose butterflies for other even n are ``swing``.
    """
    core, spare = fold(n, 1 << n.bit_length() - 1 if variant == "butterfly" else 1, kept=0)
    size, bits = len(core), len(core).bit_length() - 1
    if variant == "butterfly":
        places = [find_place(r, bits) for r in range(size)]
        halvings = [list_halves(core, places, step) for step in range(bits)]
        owners = [core[places.index(place)] for place in range(size)]
        return gather_back(scatter(n, filter(None, [spare, *halvings]), owners=owners))
    edges = [
        [add(core[child], core[parent]) for child, parent in step] for step in list_bine_edges(size)
    ]
    return gather_back(scatter(n, filter(None, [spare, *edges]), owners=[core[0]]))


def list_halves(core: Sequence[int], places: Sequence[int], step: int) -> list[Transfer]:
    """Each rank sends the half of its range that holds its partner's chunk."""
    length = len(core) >> step + 1
    return [
        add(core[r], core[partner], low := places[partner] // length * length, low + length)
        for r, partner in enumerate(list_partners(len(core), step))
    ]

"""The collective algorithms: each a few lines that return an all-reduce as a Schedule.

In the formulas n is the number of ranks, S the buffer in bytes, α the seconds for a message, β
for a byte sent, γ for a byte that arrives to be added (cost.py says what is counted); "bytes" are
those that the busiest rank sends. If a docstring says "halves", ``halve`` makes a
reduce-scatter and an all-gather, or a reduce and a broadcast, from the same steps. The comparison
follows Thakur, Rabenseifner and Gropp, IJHPCA 19(1), 2005, and Chan et al., CCPE 19(13), 2007.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Sequence

from mpiddp.schedules import formulas
from mpiddp.schedules.cost import check_nodes, split_in_two
from mpiddp.schedules.pairs import fold_ranks, powers_below
from mpiddp.schedules.registry import Choice, check_servers, find_inner, find_outer, register
from mpiddp.schedules.schedule import (
    Collective,
    Schedule,
    Transfer,
    all_reduce,
    beside,
    gather_back,
    place,
    reverse_steps,
    scatter,
)


def add(src: int, dst: int, lo: int = 0, hi: int | None = None) -> Transfer:
    """``src`` sends chunks that ``dst`` adds to its own; one chunk if ``hi`` is left out."""
    return Transfer(src, dst, lo, lo + 1 if hi is None else hi, True)


def copy(src: int, dst: int, lo: int = 0, hi: int | None = None) -> Transfer:
    """``src`` sends chunks that replace those of ``dst``; one chunk if ``hi`` is left out."""
    return Transfer(src, dst, lo, lo + 1 if hi is None else hi, False)


# ---- rings --------------------------------------------------------------------------------


@register("ring", formulas.ring)
def ring(n: int) -> Schedule:
    """Every rank passes one chunk at a time to its right neighbour, and adds what comes.

    After n − 1 steps rank r has the sum of chunk r; the gathering runs the other way round.
    2(n−1) steps; bytes 2(n−1)/n·S; 2(n−1)α + 2(n−1)/n·Sβ + (n−1)/n·Sγ. Halves. Extra buffer:
    one chunk. Patarasuk and Yuan, JPDC 69(2), 2009; our second half is the mirror image of the
    first, so it goes left.
    """
    steps = [[add(r, (r + 1) % n, (r - 1 - t) % n) for r in range(n)] for t in range(n - 1)]
    return gather_back(scatter(n, steps, owners=range(n)))


@register("naive-ring", formulas.naive_ring)
def naive_ring(n: int) -> Schedule:
    """The whole buffer goes along a chain, each rank adding its own, then once more round.

    2(n−1) steps; bytes at most 2S; 2(n−1)(α + Sβ) + (n−1)Sγ. Halves (a reduce to the last rank).
    Extra buffer: S. What tutorials draw as a ring; in segments it is the pipelined chain of Chan et
    al. 2007, and then as good as the ring.
    """
    chain = [[add(r, r + 1)] for r in range(n - 1)]
    round_again = [[copy((r - 1) % n, r)] for r in range(n - 1)]
    return all_reduce(n, 1, chain + round_again, owners=[n - 1])


# ---- powers of two ------------------------------------------------------------------------


def fold(n: int, chunks: int, kept: int = 1) -> tuple[list[int], list[Transfer]]:
    """2^k of the ranks, and the messages in which each spare one gives all to its neighbour."""
    core, spare = fold_ranks(n, kept)
    return core, [add(src, dst, 0, chunks) for src, dst in spare]


def swap_all(n: int, kept: int, list_swaps: Callable[[int], Iterable[Iterable[int]]]) -> Schedule:
    """Ranks exchange all that they have; spare ones give theirs to a neighbour, and get the result.

    ``list_swaps``: for the number of the others, 2^k, the partner of each of them, step by step.
    """
    core, spare = fold(n, 1, kept)
    swaps = [
        [add(core[i], core[j]) for i, j in enumerate(partners)]
        for partners in list_swaps(len(core))
    ]
    back = [copy(dst, src) for src, dst, *_ in spare]
    return all_reduce(n, 1, filter(None, [spare, *swaps, back]))


@register("recursive-doubling", formulas.recursive_doubling)
def recursive_doubling(n: int) -> Schedule:
    """Ranks at distance 1, 2, 4, … exchange all they have, and both add.

    lg n steps; bytes lg n·S; lg n(α + Sβ + Sγ). If n is no power of two, the spare ranks first
    give theirs to a neighbour and get the result in the end: with k = ⌊lg n⌋ then k + 2 steps,
    bytes (k+1)S, and (k+2)(α + Sβ) + (k+1)Sγ. No halves. Extra buffer: S. Thakur et al. 2005.
    """
    return swap_all(
        n, 1, lambda size: [[i ^ bit for i in range(size)] for bit in powers_below(size)]
    )


@register("halving-doubling", formulas.halving_doubling)
def halving_doubling(n: int) -> Schedule:
    """Recursive halving, then recursive doubling: Rabenseifner's algorithm.

    Ranks at distance n/2, n/4, …, 1 exchange the half that the other one goes on with.
    2 lg n steps; bytes 2(n−1)/n·S; 2 lg n·α + 2(n−1)/n·Sβ + (n−1)/n·Sγ. If n is no power of
    two, spare ranks give and get the whole buffer as in recursive doubling: with p the power of
    two below n, bytes (1 + 2(p−1)/p)S and 2(lg p + 1)α + 2(1 + (p−1)/p)Sβ + (1 + (p−1)/p)Sγ.
    Halves; a spare rank owns no chunk. Extra buffer: S/2, or S. Thakur et al. 2005; binary blocks
    are left out.
    """
    size = 1 << n.bit_length() - 1
    core, spare = fold(n, size)
    halvings = [
        [add(core[i], core[i ^ bit], low := (i ^ bit) // bit * bit, low + bit) for i in range(size)]
        for bit in reversed(powers_below(size))
    ]
    return gather_back(scatter(n, filter(None, [spare, *halvings]), owners=core))


# ---- trees --------------------------------------------------------------------------------


@register("binomial-tree", formulas.binomial_tree)
def binomial_tree(n: int) -> Schedule:
    """Reduce along a binomial tree to rank 0, broadcast back.

    2⌈lg n⌉ steps; bytes ⌈lg n⌉·S (the root's); 2⌈lg n⌉(α + Sβ) + ⌈lg n⌉Sγ. Halves (a reduce to
    rank 0). Extra buffer: S. Thakur et al. 2005.
    """
    steps = [[add(r, r - bit) for r in range(bit, n, 2 * bit)] for bit in powers_below(n)]
    return gather_back(scatter(n, steps, owners=[0]))


def grow_tree(n: int) -> list[list[tuple[int, int]]]:
    """The edges (child, parent) of a binary tree over 1 … n, in order, level by level.

    A node's subtree reaches as far to both sides as its lowest set bit; odd nodes are leaves.
    """
    levels, level = [], [1 << n.bit_length() - 1]
    while level:
        edges = []
        for parent in level:
            reach = (parent & -parent) // 2
            below = (parent + (reach >> bit) for bit in range(reach.bit_length()))
            right = next((child for child in below if child <= n), None)
            edges += [(child, parent) for child in (parent - reach, right) if reach and child]
        levels.append(edges)
        level = [child for child, _ in edges]
    return levels[:-1]


@register("double-tree", formulas.double_tree)
def double_tree(n: int) -> Schedule:
    """Two binary trees, each for half of the buffer.

    An inner node of one is a leaf of the other, so that in segments all links are used both ways.
    2⌊lg n⌋ steps; bytes at most 2S; with m = 2⌊lg n⌋, less one for a power of two, the messages
    that follow each other in each half: 2mα + mSβ + m/2·Sγ for n ≥ 2. Halves. Extra buffer: S.
    Sanders, Speck and Träff, Parallel Computing 35(12), 2009. We do not colour the edges: a parent
    receives from both children in the same step and pays for both messages, which takes as long in
    the model as one after the other.
    """
    names = [range(n), [(n - 1 - i if n % 2 == 0 else (i + 1) % n) for i in range(n)]]
    levels = grow_tree(n)
    trees = [
        [[add(name[child - 1], name[parent - 1], tree) for child, parent in level]
         for level in reversed(levels)]
        for tree, name in enumerate(names)
    ]  # fmt: skip
    root = 1 << n.bit_length() - 1
    return gather_back(scatter(n, beside(trees), owners=[name[root - 1] for name in names]))


# ---- all to all, and servers --------------------------------------------------------------


@register("one-shot", formulas.one_shot)
def one_shot(n: int) -> Schedule:
    """Every rank sends all to every other, and sums in the order of the ranks.

    1 step; bytes (n−1)S; (n−1)(α + Sβ + Sγ). No halves. Extra buffer: (n−1)S.
    """
    everything = [add(r, (r + shift) % n) for shift in range(1, n) for r in range(n)]
    return all_reduce(n, 1, filter(None, [everything]))


def push_to_servers(n: int, servers: int, dedicated: bool) -> Schedule:
    """Each worker sends each of the servers its chunk: the first half of a parameter server.

    Colocated servers are the first ranks, and workers as well; dedicated ones are the last
    ranks, and contribute nothing. Each worker begins with another server.
    """
    check_servers(n, servers, dedicated=dedicated)
    workers = n - servers if dedicated else n
    hosts = range(n - servers, n) if dedicated else range(servers)
    turns = [(r, (r + t) % servers) for t in range(servers) for r in range(workers)]
    push = [add(r, hosts[chunk], chunk) for r, chunk in turns if r != hosts[chunk]]
    return scatter(n, filter(None, [push]), owners=hosts, members=range(workers))


@register("direct", formulas.direct)
def direct(n: int, servers: int | None = None) -> Schedule:
    """Each rank is the parameter server of one chunk: all send it theirs, and it answers all.

    With ``servers`` given, only the first ones are. Reduce-scatter and all-gather in one step each.
    2 steps; bytes 2(n−1)/n·S; 2(n−1)α + 2(n−1)/n·Sβ + (n−1)/n·Sγ; with k servers bytes
    (n+k−2)/k·S, 2(n−1)/k·Sβ and (n−1)/k·Sγ. Halves. Extra buffer: (n−1)/k·S. The sharded server
    of BytePS (Jiang et al., OSDI'20), colocated.
    """
    return gather_back(push_to_servers(n, n if servers is None else servers, dedicated=False))


@register("central", formulas.central)
def central(n: int, servers: int = 1) -> Schedule:
    """The last rank is the parameter server, no worker: the others send theirs, and it answers all.

    With ``servers``, each of them has a part of the buffer. One rank alone serves itself.
    2 steps; bytes (n−k)/k·S of a server, with k servers; 2(n−k)α + 2(n−k)/k·Sβ + (n−k)/k·Sγ for
    k ≤ n/2. Halves. Extra buffer: (n−k)/k·S on servers. Li et al., OSDI'14.
    """
    return gather_back(push_to_servers(n, servers, dedicated=n > 1))


@register("gather-broadcast", formulas.gather_broadcast)
def gather_broadcast(n: int) -> Schedule:
    """All send their buffer to rank 0, which sums and sends the result to all.

    2 steps; bytes (n−1)S (the root's); 2(n−1)(α + Sβ) + (n−1)Sγ. Halves (a reduce to rank 0).
    Extra buffer: (n−1)S on rank 0. What ``torch.nn.DataParallel`` does, with gradients there and
    parameters back.
    """
    return gather_back(push_to_servers(n, 1, dedicated=False))


# ---- nodes --------------------------------------------------------------------------------


@register("two-level", formulas.two_level)
def two_level(
    n: int, nodes: Sequence[int] | None = None, inner: str = "direct", outer: str = "ring"
) -> Schedule:
    """Reduce-scatter in each node, all-reduce between nodes, all-gather in each node.

    ``nodes`` has the ranks of each node, which may differ; two halves if it is not given.
    ``inner`` is an algorithm with halves, ``outer`` any that leaves no rank out. A chunk travels
    between the ranks that own it half way, one on each node. If nodes differ in size, so do
    the pieces that such ranks own in common, and each piece has an all-reduce of its own, all of
    them at once. No halves. Extra buffer: the greater of the two levels'.
    On M nodes of m ranks, direct inside and ring between: 2M steps; 2(m−1)α + 2(m−1)/m·Sβ +
    (m−1)/m·Sγ inside, and 2(M−1)α + 2(M−1)/M·Sβ + (M−1)/(mM)·Sγ over each node's link. As
    BlueConnect (Cho et al., SysML'19), but for any number of ranks on each node.
    """
    sizes = split_in_two(n) if nodes is None else check_nodes(n, nodes)
    across = find_outer(outer).make(len(sizes))
    level = Choice(find_inner(inner))
    parts = {size: level.build_half(Collective.REDUCE_SCATTER, size) for size in set(sizes)}
    halves = [parts[size] for size in sizes]
    firsts = [sum(sizes[:node]) for node in range(len(sizes))]
    # Fine enough for each node's pieces and for the outer algorithm's chunks of any of them.
    pieces = math.lcm(*(half.chunks for half in halves))
    chunks = pieces * across.chunks
    within = beside(
        place(half, n, range(first, first + half.ranks), 0, chunks // half.chunks)
        for half, first in zip(halves, firsts, strict=True)
    )
    members = [first + r for half, first in zip(halves, firsts, strict=True) for r in half.members]
    between = beside(
        place(across, n, ranks, low * across.chunks, high - low)
        for ranks, low, high in _find_rails(halves, firsts, pieces)
    )
    steps = within + between + reverse_steps(within)
    packed = across.packed or any(half.packed for half in halves)
    return all_reduce(n, chunks, steps, members=members, packed=packed)


def _find_rails(
    halves: Sequence[Schedule], firsts: Sequence[int], pieces: int
) -> list[tuple[tuple[int, ...], int, int]]:
    """The ranks, one of each node, that own the same pieces, and those pieces."""

    def owners(piece: int) -> tuple[int, ...]:
        return tuple(
            first + half.owners[piece * half.chunks // pieces]
            for half, first in zip(halves, firsts, strict=True)
        )

    rails = []
    for ranks, group in itertools.groupby(range(pieces), owners):
        same = list(group)
        rails.append((ranks, same[0], same[-1] + 1))
    return rails

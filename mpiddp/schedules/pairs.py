"""Which ranks exchange which chunks, in algorithms of swaps, PAT, Swing and Bine trees.

Apart from the algorithms, since their closed forms count the same pairs.
"""

from __future__ import annotations


def fold_ranks(n: int, kept: int) -> tuple[list[int], list[tuple[int, int]]]:
    """2^k of the ranks, and the neighbour to which each spare rank gives all.

    Of two neighbours the odd rank goes on if ``kept`` is 1, the even one if it is 0.
    """
    spare = n - (1 << n.bit_length() - 1)
    core = [*range(kept, 2 * spare, 2), *range(2 * spare, n)]
    return core, [(r + 1 - kept, r + kept) for r in range(0, 2 * spare, 2)]


def powers_below(n: int) -> list[int]:
    """1, 2, 4, … below n."""
    return [1 << bit for bit in range((n - 1).bit_length())]


# ---- PAT ----------------------------------------------------------------------------------


def list_pat_steps(n: int, aggregation: int | None) -> list[tuple[int, range]]:
    """For each step of the reduce-scatter: how far messages go, and whose chunks they hold.

    Rank r sends to the rank that many places below it the chunks of the ranks r − s.
    """
    power = 1 << (n - 1).bit_length()
    trees = power if aggregation is None else min(power, 1 << aggregation.bit_length() - 1)
    apart = power // trees
    linear = [(low & -low, range(low, n, apart)) for low in range(apart - 1, 0, -1)]
    halving = [(near, range(near, n, 2 * near)) for near in powers_below(n) if near >= apart]
    return [(near, offsets) for near, offsets in (*linear, *halving) if offsets]


# ---- Swing --------------------------------------------------------------------------------


def count_steps(n: int) -> int:
    """⌈lg n⌉, and 0 for no ranks."""
    return max(n - 1, 0).bit_length()


def find_hop(step: int) -> int:
    """Swing's ρ(s) = Σ (−2)^i for i ≤ s: 1, −1, 3, −5, 11, …"""
    power = 2 << step
    return (1 - power if step % 2 else 1 + power) // 3


def list_partners(n: int, step: int) -> list[int]:
    """The partner of each of an even number of ranks: even ones swing one way, odd ones back."""
    hop = find_hop(step)
    return [(r - hop if r % 2 else r + hop) % n for r in range(n)]


def find_last_steps(n: int) -> dict[int, int]:
    """For each chunk but 0, the step in which rank 0 of an even number sends it, the last that can.

    An even rank r sends chunk r + c where rank 0 sends c, an odd one r − c. A chunk can leave in a
    step if some of the later steps lead from the partner to its owner.
    """
    last: dict[int, int] = {}
    reached = {0}
    for step in reversed(range(count_steps(n))):
        # The partner is odd, so what it reaches lies on its other side.
        beyond = {(find_hop(step) - chunk) % n for chunk in reached}
        for chunk in beyond - {0}:
            last.setdefault(chunk, step)
        reached |= beyond
    return last


# ---- Bine trees ---------------------------------------------------------------------------


def find_digits(value: int, bits: int) -> int:
    """The lowest ``bits`` digits of an integer to the base −2, as the bits of a number."""
    mask = sum(2 << 2 * place for place in range(bits))
    return ((value + mask) ^ mask) & ((1 << bits) - 1)


def list_bine_edges(size: int) -> list[list[tuple[int, int]]]:
    """Child and parent of each edge of the tree over 2^k ranks, step by step, towards rank 0."""
    bits = size.bit_length() - 1
    active, steps = list(range(size)), []
    for step in range(bits):
        partners = list_partners(size, step)
        equal = (1 << min(step + 2, bits)) - 1
        # In the last step both have equal digits, all 0 in the root's case.
        final = {0} if step == bits - 1 else {0, equal}
        stays = [r for r in active if find_digits(r, bits) & equal in final]
        steps.append([(partners[parent], parent) for parent in stays])
        active = stays
    return steps


def find_place(rank: int, bits: int) -> int:
    """The chunk that is left to a rank of the butterfly: the paper's ν."""
    digits = find_digits(rank if rank % 2 else -rank, bits)
    gray = digits ^ digits >> 1
    return sum((gray >> place & 1) << (bits - 1 - place) for place in range(bits))

"""Sums by the order of their additions, so that equal bits are known without values."""

from __future__ import annotations

from collections.abc import Sequence


class Trees:
    """Reduction trees, each known by a number: equal numbers, equal orders of addition.

    Two trees that differ in the order of the operands of one addition are equal, since the bits of
    the sums are.
    """

    def __init__(self) -> None:
        self._masks: list[int] = []
        self._homes: list[int] = []
        self._known: dict[tuple[int, int], int] = {}

    def add_leaf(self, rank: int, chunk: int) -> int:
        """The tree of a rank's own value of a chunk; numbered from 0 in the order of the calls."""
        self._masks.append(1 << rank)
        self._homes.append(chunk)
        return len(self._masks) - 1

    def add(self, values: Sequence[int]) -> int:
        """The tree of a sum, made from the left.

        Raises ValueError for a contribution that is added twice, and for different chunks.
        """
        left = values[0]
        for right in values[1:]:
            operands = (left, right) if left < right else (right, left)
            tree = self._known.get(operands)
            left = self._make(left, right, operands) if tree is None else tree
        return left

    def _make(self, left: int, right: int, operands: tuple[int, int]) -> int:
        masks, homes = self._masks, self._homes
        if homes[left] != homes[right]:
            raise ValueError(f"chunk {homes[right]} is added to chunk {homes[left]}")
        if twice := masks[left] & masks[right]:
            raise ValueError(f"the contribution of {name_ranks(twice)} is added twice")
        masks.append(masks[left] | masks[right])
        homes.append(homes[left])
        self._known[operands] = tree = len(masks) - 1
        return tree

    def find_mask(self, tree: int | None) -> int:
        """The ranks whose contributions it is the sum of, one bit each; 0 for None."""
        return 0 if tree is None else self._masks[tree]

    def find_home(self, tree: int) -> int:
        """The chunk of the ranks' own that it is the sum of."""
        return self._homes[tree]


def make_mask(ranks: Sequence[int]) -> int:
    """One bit for each of some ranks."""
    return sum(1 << rank for rank in ranks)


def name_ranks(mask: int) -> str:
    """``rank 3``, or ``ranks 0, 2``."""
    ranks = [str(rank) for rank in range(mask.bit_length()) if mask >> rank & 1]
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(ranks)}"

"""The options of all commands that measure collectives, each defined once."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import chain, product
from typing import Annotated, Any, TypeVar

import psutil

from benchmarks.measure import trials
from benchmarks.records.collectives import ITEM_BYTES, NCCL_TESTS
from benchmarks.records.contenders import (
    ALL_GATHER,
    ALL_PAIRS,
    ALL_REDUCE,
    BROADCAST,
    BUFFERS,
    OPERATORS,
    POINT_TO_POINT,
    PRIVATE,
    REDUCE,
    REDUCE_SCATTER,
    SHARED,
    TRANSPORTS,
)
from benchmarks.records.options import (
    Count,
    CountOrZero,
    Load,
    RunOptions,
    Seconds,
    SeveralRanks,
    SizeRanges,
    is_srun,
    read_sizes,
)
from mpiddp.errors import ConfigurationError
from mpiddp.options.fields import Argument
from mpiddp.options.outputs import PICTURE, RECORD, TABLE, Outputs, writes
from mpiddp.schedules.registry import names
from mpiddp.schedules.registry import parse as parse_algorithm
from mpiddp.wording import describe_size

T = TypeVar("T")
ALL = "all"
SIZES = {
    ALL_REDUCE: ("8", "512", "4K", "32K", "256K", "1M", "4M", "16M", "64M"),
    POINT_TO_POINT: ("1:64M:x4",),
    ALL_PAIRS: ("8", "1M"),
}
ALGORITHMS = {
    ALL_REDUCE: ("auto", "ring", "central", "direct"),
    REDUCE_SCATTER: ("auto", "ring", "direct"),
    ALL_GATHER: ("auto", "ring", "direct"),
    BROADCAST: ("auto", "binomial-tree", "gather-broadcast", "naive-ring"),
    REDUCE: ("auto", "binomial-tree", "gather-broadcast", "naive-ring"),
}
_MESSAGES = ("algorithms", "load", "buffers", "types", "operators", "overlap", "guidelines")
_PROMISES = ("link", "targets")
"""Of all-reduces alone."""
HAS_NOT = {
    ALL_REDUCE: (),
    REDUCE_SCATTER: _PROMISES,
    ALL_GATHER: ("operators", *_PROMISES),
    BROADCAST: ("operators", *_PROMISES),
    REDUCE: _PROMISES,
    POINT_TO_POINT: ("ranks", *_MESSAGES, *_PROMISES),
    ALL_PAIRS: ("transports", *_MESSAGES, *_PROMISES),
}
"""Options that make no sense for a quantity."""


@dataclass(frozen=True, kw_only=True)
class CollectiveRun(RunOptions[T]):
    """Where ranks are started, and where the results go."""

    output: Annotated[Outputs, writes(RECORD, TABLE, NCCL_TESTS, PICTURE)] = ()
    """Write what was measured."""


@dataclass(frozen=True, kw_only=True)
class PairsRun(RunOptions[T]):
    """Where ranks are started, and where the results go."""

    output: Annotated[Outputs, writes(RECORD, TABLE)] = ()
    """Write what was measured."""


@dataclass(frozen=True, kw_only=True)
class CollectivesPlan(trials.Plan):
    """What is measured."""

    quantity: str = ALL_REDUCE
    """Given by the command."""
    probes: bool = False
    """Whether the machine's own limits are measured, too; given by the command."""
    rivals: bool = True
    """Whether others' collectives are measured beside mpiddp's; given by the command."""
    ranks: SeveralRanks = ()
    """Numbers of ranks (default: 2 4; with srun 4 8)."""
    sizes: SizeRanges = ()
    """Of a rank's largest buffer, as 4096, 64K, 16MiB, or FROM:TO:xFACTOR (default: from a few
    bytes to 64M; all-pairs 8 1M)."""
    types: Annotated[tuple[str, ...], Argument(choices=tuple(ITEM_BYTES))] = ("float32",)
    """Of the elements."""
    operators: Annotated[tuple[str, ...], Argument(choices=OPERATORS)] = ("sum",)
    """Of reductions."""
    algorithms: Annotated[tuple[str, ...], Argument("ALGORITHM")] = ()
    """mpiddp's, or all (default: its own choice and the usual ones)."""
    load: Load = ()
    """Algorithms of your own: Python files or plans."""
    transports: Annotated[tuple[str, ...], Argument(choices=TRANSPORTS)] = ("auto",)
    """Of mpiddp's messages."""
    buffers: Annotated[tuple[str, ...], Argument(choices=BUFFERS)] = (PRIVATE, SHARED)
    """Of mpiddp's collectives."""
    cold: bool = False
    """Empty the caches before each call."""
    busy: CountOrZero = 0
    """Busy processes on each node meanwhile."""
    overlap: bool = False
    """Compute in the ranks meanwhile: how much of the collective that hides."""
    guidelines: bool = False
    """Also measure what a collective can be replaced by, to which it must not lose."""
    budget: Seconds = 0.8
    """For each contender and size; at least three rounds are measured."""
    repetitions: Count = 0
    """Measured rounds (default: until the 95 % interval of the median is within 5 % of it, or the
    budget is spent)."""
    deadline: Seconds = 120.0

    @property
    def bytes(self) -> tuple[int, ...]:
        """All sizes, in rising order."""
        usual = SIZES.get(self.quantity, SIZES[ALL_REDUCE])
        ranges = self.sizes or tuple(map(read_sizes, usual))
        return tuple(sorted(set(chain.from_iterable(ranges))))

    @property
    def conditions(self) -> dict[str, int]:
        """Those under which it is measured, for a record."""
        found = {"cold": int(self.cold), "busy": self.busy, "overlap": int(self.overlap)}
        return {name: value for name, value in found.items() if value}


def complete(quantity: str, options: RunOptions[CollectivesPlan]) -> CollectivesPlan:
    """The plan of a quantity, with the usual ranks and algorithms if none are given.

    Raises ConfigurationError for an unknown algorithm, for sizes that are no whole elements, and
    for buffers that do not fit into this machine; ScheduleError for an algorithm that is no
    all-reduce of so many ranks.
    """
    plan = replace(options.plan, quantity=quantity)
    plan = replace(plan, ranks=_choose_ranks(plan, options))
    if plan.quantity not in (ALL_PAIRS, POINT_TO_POINT):
        check_sizes(plan)
        wanted = plan.algorithms or ALGORITHMS[plan.quantity]
        named = [["auto", *names()] if text == ALL else [_name_algorithm(text)] for text in wanted]
        plan = replace(plan, algorithms=tuple(dict.fromkeys(chain.from_iterable(named))))
    if plan.quantity == ALL_REDUCE:
        check_algorithms(plan)
        plan = replace(plan, probes=options.targets)
    if not is_srun(options.launcher):
        check_memory(plan, max(plan.ranks), 1, psutil.virtual_memory().available)
    return plan


def _choose_ranks(plan: CollectivesPlan, options: RunOptions[Any]) -> tuple[int, ...]:
    if plan.quantity == POINT_TO_POINT:
        return (2,)
    pairs = (options.nodes or 4,)
    usual = (pairs, pairs) if plan.quantity == ALL_PAIRS else ((2, 4), (4, 8))
    return options.choose_ranks(plan.ranks, *usual)


def check_sizes(plan: CollectivesPlan) -> None:
    """Raise ConfigurationError for sizes that are no whole elements."""
    for kind, size in product(plan.types, plan.bytes):
        if size % ITEM_BYTES[kind]:
            raise ConfigurationError(
                f"--sizes: expected whole elements of {ITEM_BYTES[kind]} bytes ({kind}), found "
                f"{size}"
            )


def _name_algorithm(text: str) -> str:
    return text if text == "auto" else str(parse_algorithm(text))


def check_algorithms(plan: CollectivesPlan) -> None:
    """Raise ScheduleError for an algorithm that is no all-reduce of so many ranks.

    One that does not support so many ranks is left out of the tables, with the reason.
    """
    for name, ranks in product(plan.algorithms, plan.ranks):
        if name != "auto":
            with suppress(ConfigurationError):
                parse_algorithm(name).build(ranks)


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

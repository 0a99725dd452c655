"""The options of all commands that measure collectives, each defined once."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import chain, product
from typing import Annotated, Any, TypeVar

from benchmarks.measure import trials
from benchmarks.records.collectives import COLLECTIVES, ITEM_BYTES, NCCL_TESTS
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
    describe_algorithms,
    make_reader,
    make_run,
    read_sizes,
)
from mpiddp.errors import ConfigurationError
from mpiddp.options.fields import Argument
from mpiddp.options.outputs import PICTURE, RECORD, TABLE, Outputs, writes
from mpiddp.schedules.registry import names
from mpiddp.schedules.registry import parse as parse_algorithm

T = TypeVar("T")
ALL = "all"
RANKS_ON_CLUSTER = (4, 8)
QUANTITIES = {
    {ALL_REDUCE: "allreduce"}.get(quantity, quantity): quantity
    for quantity in (*COLLECTIVES, POINT_TO_POINT, ALL_PAIRS)
}
"""What each command measures."""
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
_HAS_NOT = {
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


_RUNS: dict[str, type[Any]] = {POINT_TO_POINT: RunOptions, ALL_PAIRS: PairsRun}
"""The options of runs that are not those of a collective."""


@dataclass(frozen=True, kw_only=True)
class CollectivesPlan(trials.Plan):
    """What is measured."""

    quantity: str = ALL_REDUCE
    """Given by the command."""
    probes: bool = False
    """Whether the machine's own limits are measured, too; given by the command."""
    rivals: bool = True
    """Whether others' collectives are measured beside mpiddp's; given by the command."""
    ranks: SeveralRanks = (2, 4)
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


def parse(command: str, arguments: Sequence[str]) -> RunOptions[CollectivesPlan]:
    """The options of a command line. Raises ConfigurationError."""
    quantity, epilog = QUANTITIES[command], ""
    if "algorithms" not in _HAS_NOT[quantity]:
        epilog = f"{describe_algorithms('ring:segments=4')} auto lets mpiddp choose. "
    reader = make_reader(
        command=command,
        description=f"Time {quantity} in turns, by size: the framework's, MPI's and mpiddp's.",
        groups={"what is measured": CollectivesPlan, "the run": _RUNS.get(quantity, CollectiveRun)},
        epilog=f"{epilog}Sizes are powers of 2: 1K is 1024 bytes. A contender that cannot do what "
        "is asked for is left out of the table, with the reason.",
        without=("quantity", "probes", "rivals", *_HAS_NOT[quantity]),
    )
    values: dict[str, Any] = {"quantity": quantity, **reader.read(arguments)}
    if quantity == ALL_PAIRS:
        values = {"ranks": (values.get("nodes", RANKS_ON_CLUSTER[0]),), **values}
    run = make_run(values, CollectivesPlan, RANKS_ON_CLUSTER)
    has_probes = quantity == ALL_REDUCE and run.targets
    return replace(run, plan=finish(replace(run.plan, probes=has_probes)))


def finish(plan: CollectivesPlan) -> CollectivesPlan:
    """The plan with mpiddp's names of algorithms, the usual ones if it has none.

    Raises ConfigurationError for an unknown one, and for sizes that are no whole elements.
    """
    if plan.quantity == POINT_TO_POINT:
        return replace(plan, ranks=(2,))
    if plan.quantity != ALL_PAIRS:
        for kind, size in product(plan.types, plan.bytes):
            if size % ITEM_BYTES[kind]:
                raise ConfigurationError(
                    f"--sizes: expected whole elements of {ITEM_BYTES[kind]} bytes ({kind}), found "
                    f"{size}"
                )
    wanted = plan.algorithms or ALGORITHMS.get(plan.quantity, ())
    named = [["auto", *names()] if text == ALL else [_name_algorithm(text)] for text in wanted]
    return replace(plan, algorithms=tuple(dict.fromkeys(chain.from_iterable(named))))


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

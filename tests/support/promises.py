"""What schedules promise of any buffers and operators; and schedules to try it on."""

from collections.abc import Collection, Sequence
from functools import partial, reduce

import torch
from hypothesis import Phase
from hypothesis import strategies as st

from mpiddp.collectives.compiler.hazards import find_part
from mpiddp.collectives.compiler.instructions import RankProgram
from mpiddp.collectives.compiler.lowering import compile_part
from mpiddp.collectives.compiler.pieces import BufferCut
from mpiddp.collectives.transport.operators import Operator
from mpiddp.schedules import registry
from mpiddp.schedules.schedule import (
    Schedule,
    Transfer,
    all_reduce,
    halve,
    reverse,
    rotate,
    segment,
)
from oracle import check_promises

PHASES = (Phase.explicit, Phase.reuse, Phase.generate)
"""Without shrinking: where ranks wait for each other in vain, every attempt takes its time."""
FUNCTIONS = {
    Operator.SUM: torch.add, Operator.AVERAGE: torch.add, Operator.PRODUCT: torch.mul,
    Operator.MIN: torch.minimum, Operator.MAX: torch.maximum,
}  # fmt: skip


def combine(values: Sequence[torch.Tensor], operator: Operator) -> torch.Tensor:
    """The result for these contributions. Narrow types are added as float32 and rounded once."""
    dtype = values[0].dtype
    if dtype in (torch.float16, torch.bfloat16):
        values = [value.float() for value in values]
    total = reduce(FUNCTIONS[operator], values)
    if operator is Operator.AVERAGE:
        total = total / len(values)
    return total.to(dtype)


def check(
    schedule: Schedule,
    before: Sequence[torch.Tensor],
    after: Sequence[torch.Tensor],
    operator: Operator = Operator.SUM,
) -> None:
    """AssertionError unless every promise is kept exactly."""
    check_promises(schedule, before, after, partial(combine, operator=operator))


def list_variants(whole: Schedule) -> list[Schedule]:
    """The schedule, in parts too, and what can be made of its halves."""
    schedules = [whole, segment(whole, 3)]
    if whole.owners:
        for half in halve(whole):
            turned = rotate(half, whole.ranks // 2 + 1)
            schedules += [half, reverse(half), turned, segment(turned, 2)]
    return schedules


def build(name: str, ranks: int, nodes: Sequence[int] | None = None) -> Schedule:
    """The algorithm's schedule; ``nodes`` matters to those who know of nodes."""
    return registry.parse(name).build(ranks, nodes)


def list_all(ranks: int, nodes: Sequence[int] | None = None) -> list[tuple[str, Schedule]]:
    return [
        (name, variant)
        for name in registry.names()
        for variant in list_variants(build(name, ranks, nodes))
    ]


@st.composite
def node_sizes(draw: st.DrawFn, ranks: int) -> list[int]:
    """Ranks on nodes, the first ones on the first, as many as it happens."""
    sizes = []
    while sum(sizes) < ranks:
        sizes.append(draw(st.integers(1, ranks - sum(sizes))))
    return sizes


@st.composite
def random_trees(draw: st.DrawFn) -> Schedule:
    """An all-reduce that nobody would write: every chunk has a tree of its own to be summed along,
    another one to be handed out along, and pauses in between."""
    ranks, chunks = draw(st.integers(2, 6)), draw(st.integers(1, 4))
    steps: dict[int, list[Transfer]] = {}
    for chunk in range(chunks):
        order = draw(st.permutations(range(ranks)))
        gone = [0] * ranks
        for place in range(ranks - 1, 0, -1):
            child, parent = order[place], order[draw(st.integers(0, place - 1))]
            step = gone[child] + draw(st.integers(0, 2))
            steps.setdefault(step, []).append(Transfer(child, parent, chunk, chunk + 1, True))
            gone[parent] = max(gone[parent], step + 1)
        root = order[0]
        there = {root: gone[root]}
        for rank in draw(st.permutations([rank for rank in range(ranks) if rank != root])):
            source = draw(st.sampled_from(sorted(there)))
            step = there[source] + draw(st.integers(0, 2))
            steps.setdefault(step, []).append(Transfer(source, rank, chunk, chunk + 1, False))
            there[rank] = step + 1
    return all_reduce(ranks, chunks, [steps.get(step, []) for step in range(max(steps) + 1)])


def group_ranks(nodes: Sequence[int]) -> list[range]:
    groups: list[range] = []
    for size in nodes:
        groups += [range(len(groups), len(groups) + size)] * size
    return groups


def compile_all(
    schedule: Schedule, count: int, nodes: Sequence[int], cut: BufferCut | None = None
) -> list[RankProgram]:
    cut = cut or BufferCut(1 << 20, 1 << 20, True)
    groups = group_ranks(nodes)
    return [
        compile_program(schedule, rank, count, groups[rank], cut) for rank in range(schedule.ranks)
    ]


def compile_program(
    schedule: Schedule, rank: int, count: int, group: Collection[int], cut: BufferCut
) -> RankProgram:
    """The instructions of ``rank`` for ``count`` elements; ``group`` shares its memory with it."""
    return compile_part(find_part(schedule, rank, group), count, cut)

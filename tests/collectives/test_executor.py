"""Every registered algorithm and what is made of its halves, run by ranks that are threads: over
messages, in memory, and both."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import interleavings
import promises
from mpiddp.collectives.compiler.instructions import ProgramMessage
from mpiddp.collectives.executor import Description, Recent, Workspace
from mpiddp.collectives.transport.operators import NARROW, TYPES, Operator
from mpiddp.errors import PeerLostError
from mpiddp.schedules import registry
from mpiddp.schedules.proof import find_sums
from thread_ranks import Team

TRANSPORTS = ("messages", "memory", "hybrid")
RUNS = 3
"""Of each bound program."""
FACTORS = {Operator.PRODUCT: (1, 2), Operator.AVERAGE: (-40, 41)}
"""What buffers are drawn from, so that nothing is rounded."""


def draw_nodes(data, transport: str, ranks: int) -> list[int]:
    if transport == "messages":
        return [1] * ranks
    if transport == "memory":
        return [ranks]
    return data.draw(promises.node_sizes(ranks), "nodes")


def fill(buffers, operator: Operator, seed: int) -> list[torch.Tensor]:
    """New numbers in the buffers; returns a copy of them."""
    generator = torch.Generator().manual_seed(seed)
    for buffer in buffers:
        numbers = torch.randint(
            *FACTORS.get(operator, (-20, 21)), buffer.shape, generator=generator
        )
        buffer.copy_(numbers)
    return [buffer.clone() for buffer in buffers]


def check_runs(team: Team, operator: Operator, seed: int) -> None:
    """Run several times, each with numbers of its own."""
    for turn in range(RUNS):
        before = fill(team.buffers, operator, seed + turn)
        team.play()
        promises.check(team.schedule, before, team.buffers, operator)


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("name", registry.names())
@settings(max_examples=5, phases=promises.PHASES)
@given(data=st.data())
def test_every_promise_is_kept_by_ranks_that_run_at_the_same_time(name, transport, data):
    ranks = data.draw(st.integers(1, 6), "ranks")
    nodes = draw_nodes(data, transport, ranks)
    variants = promises.list_variants(promises.build(name, ranks, nodes))
    schedule = data.draw(st.sampled_from(variants), "schedule")
    chunks = schedule.chunks
    count = data.draw(st.sampled_from([0, 1, chunks - 1, 2 * chunks, 5 * chunks + 3]), "count")
    operator = data.draw(st.sampled_from(Operator), "operator")
    dtype = data.draw(st.sampled_from(TYPES), "type")
    if operator is Operator.AVERAGE and not dtype.is_floating_point:
        dtype = torch.float32
    single = find_sums(schedule).is_single
    team = Team(
        schedule,
        [torch.zeros(count, dtype=dtype) for _ in range(ranks)],
        nodes,
        operator=operator,
        accumulation=torch.float32 if single and dtype in NARROW else dtype,
        cell=data.draw(st.integers(1, 9), "cell"),
        message=data.draw(st.integers(1, 40), "message"),
        flows=data.draw(st.booleans(), "flows"),
    )
    interleavings.check(team.programs)
    check_runs(team, operator, data.draw(st.integers(0, 99), "seed"))


@pytest.mark.parametrize("nodes", [[1, 1, 1], [3], [2, 1]])
def test_long_buffers_in_many_cells_arrive_whole(nodes):
    schedule = registry.parse("naive-ring:segments=5").build(3)
    buffers = [torch.zeros(30_001, dtype=torch.float64) for _ in range(3)]
    check_runs(Team(schedule, buffers, nodes, cell=2999, message=5000), Operator.SUM, 1)


@pytest.mark.parametrize("nodes", [[1] * 4, [1, 3]])
def test_elements_around_the_buffers_are_nobody_s_business(nodes):
    for _, schedule in promises.list_all(4, nodes)[::2]:
        count = 3 * schedule.chunks + 1
        around = [torch.full((count + 8,), 7.0) for _ in range(4)]
        team = Team(schedule, [each[4:-4] for each in around], nodes, cell=2, message=5)
        check_runs(team, Operator.SUM, 3)
        for each in around:
            assert each[:4].eq(7).all() and each[-4:].eq(7).all()


def count_bytes(workspace: Workspace) -> int:
    spaces = workspace._spaces.values()
    return sum(len(space.memory) * space.dtype.itemsize for space in spaces)


@pytest.mark.parametrize("name", registry.names())
@pytest.mark.parametrize("ranks", [2, 6])
def test_in_memory_a_binding_takes_no_more_than_blocks_beside_what_is_read_early(name, ranks):
    schedule = promises.build(name, ranks)
    cell, count = 8, 48 * schedule.chunks
    most = max(len({t.src for t in step if t.reduce}) for step in schedule.steps)
    for dtype, accumulation in ((torch.float32, None), (torch.float16, torch.float32)):
        buffers = [torch.zeros(count, dtype=dtype) for _ in range(ranks)]
        team = Team(schedule, buffers, [ranks], accumulation=accumulation, cell=cell)
        for program, workspace in zip(team.programs, team.workspaces, strict=True):
            wide = (accumulation or dtype).itemsize
            blocks = most * cell * dtype.itemsize + cell * wide
            assert count_bytes(workspace) <= program.scratch * dtype.itemsize + blocks


def test_the_value_that_was_unused_longest_makes_room():
    recent, made = Recent(most=2), []
    for key in "abacab":
        recent.find(key, lambda key=key: made.append(key) or key)
    assert made == list("abcb")


def test_another_thread_may_make_room_while_one_looks():
    recent: Recent[int] = Recent(most=2)

    class Key:
        """Between two accesses another thread looks for two other values."""

        def __hash__(self):
            for other in next(others):
                recent.find(other, lambda: 0)
            return 1000

    key, others = Key(), iter([(), (), (), (1, 2), ()])
    assert [recent.find(each, lambda: 1) for each in (key, 0, key)] == [1, 1, 1]


def test_a_description_says_for_whom_where_and_in_which_step():
    description = Description("all_reduce (ring over mpi)", 6, {1: "n17"})
    assert description.describe_wait(0, 1) == (
        "all_reduce (ring over mpi), in step 1 of 6: waited for rank 1 on n17"
    )
    assert (
        description.describe_wait(5, 2)
        == "all_reduce (ring over mpi), in step 6 of 6: waited for rank 2"
    )
    assert "at its end: waited for rank 1 on n17" in description.describe_wait(6, 1)
    message = ProgramMessage(True, 3, 1, 0, 5, False, 0)
    assert description.describe_message(message) == description.describe_wait(3, 1)


@pytest.mark.parametrize("nodes", [[1, 1, 1], [3]])
def test_a_rank_that_does_not_come_is_named_by_who_waits_for_it(nodes):
    schedule = promises.build("ring", 3)
    team = Team(schedule, [torch.zeros(9) for _ in range(3)], nodes, seconds=0.3)
    with pytest.raises(PeerLostError):
        team.play(absent=[2])
    wanted = "test, in step 1 of 4: waited for rank 2 for 0.3 s"
    assert any(str(error).startswith(wanted) for error in team.errors)
    # Rank 1 has what rank 0 sent, and waits for it, or for rank 2, in a later step.
    assert all("waited for rank" in str(error) for error in team.errors)

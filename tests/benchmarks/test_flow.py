"""Compiled programs on a modelled machine: by hand, and never slower than step after step."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.judge.fit.flow import flow
from mpiddp.collectives.compiler.pieces import BufferCut
from mpiddp.schedules import registry
from mpiddp.schedules.cost import flat, simulate, split
from mpiddp.schedules.machine import Machine, MessageCost
from mpiddp.schedules.schedule import Transfer, all_reduce
from prices import FULL, build, machines


def run(schedule, machine, parts, size=12, nodes=None):
    longest = math.ceil(size / schedule.chunks / parts) or 1
    cut = BufferCut(cell=longest, message=longest, flows=True)
    return flow(schedule, size, machine, nodes or (1,) * schedule.ranks, cut)


def chain(ranks):
    return all_reduce(ranks, 1, [[Transfer(r, r + 1, 0, 1, True)] for r in range(ranks - 1)])


def test_a_chain_of_parts_takes_little_more_than_one_message_by_hand():
    # 12 bytes in 3 parts: each takes 4·2 s, then 5 s to arrive, then 4·1 s to be added.
    machine = flat(5, 2, 1)
    # Rank 1 has them at 17, 25 and 33; the third leaves from 33 to 41, and is added at 50.
    assert run(chain(3), machine, 3) == [24, 41, 50]
    # In one part there is nothing to hide.
    assert run(chain(3), machine, 1) == [24, 24 + 5 + 12 + 24, 2 * (24 + 5 + 12)]
    assert run(build("ring", 4), flat(1, 1), 3, size=0) == [0, 0, 0, 0]


def test_parts_are_taken_in_the_order_of_steps():
    # Rank 2 hears rank 1 at once, in the second step, and needs rank 0's first, which is later.
    steps = [[Transfer(3, 0, 0, 1, True)], [Transfer(0, 2, 0, 1, True)],
             [Transfer(1, 2, 1, 2, True)], [Transfer(2, 1, 1, 2, False)]]  # fmt: skip
    ends = run(all_reduce(4, 2, steps), flat(0, 1), 1, size=20)
    # 3 to 0: 10 s, 0 to 2: until 20; what came at 10 is taken then, and sent back until 30.
    assert ends == [20, 30, 30, 10]


def test_ranks_of_a_node_share_its_link():
    step = [Transfer(0, 2, 0, 1, False), Transfer(1, 3, 0, 1, False)]
    machine = Machine(MessageCost(0, 1), MessageCost(5, 2))
    assert run(all_reduce(4, 1, [step]), machine, 1, nodes=(2, 2)) == [24, 48, 29, 53]
    assert run(all_reduce(4, 1, [step]), machine, 1) == [24, 24, 29, 29]
    half = Machine(MessageCost(0, 1), MessageCost(5, 2), shared=1)
    assert run(all_reduce(4, 1, [step]), half, 1, nodes=(2, 2)) == [24, 36, 29, 41]


def test_connections_that_meet_at_a_port_share_it_evenly():
    # Rank 0 sends 60 parts of 1 s to rank 2 and as many to rank 3, so both end together.
    step = [Transfer(0, 2, 0, 1, False), Transfer(0, 3, 0, 1, False)]
    ends = run(all_reduce(4, 1, [step]), flat(0, 1), 60, size=60)
    assert ends[2:] == [119, 120]
    # The inner nodes of two trees hear both children and the root, a third of the port each: 3/2 S.
    # Only then do they pass the sum on to both children: S more.
    ends = run(build("double-tree", 4), flat(0, 1), 200, size=2000)
    assert max(ends) == pytest.approx(2.5 * 2000, rel=0.02)


@pytest.mark.parametrize("name", registry.names())
@settings(max_examples=5)
@given(
    ranks=st.integers(2, 9), hosts=st.integers(1, 9), parts=st.integers(1, 5), machine=machines()
)
def test_every_algorithm_ends_and_sends_no_more_than_it_must(name, ranks, hosts, parts, machine):
    nodes = split(ranks, min(hosts, ranks))
    schedule = build(name, ranks, nodes if name == "two-level" else None)
    size = 12 * schedule.chunks
    ends = run(schedule, machine, parts, size, nodes)
    sent = simulate(schedule, size, machine, nodes).sent
    quickest = min(machine.inside.seconds_per_byte, machine.between.seconds_per_byte)
    assert max(ends) >= sent.max() * quickest * (1 - 1e-9)


@pytest.mark.parametrize("name", [name for name in FULL if not build(name, 5).packed])
def test_in_one_part_nothing_is_clearly_slower_than_step_after_step(name):
    for ranks in (2, 5, 8):
        schedule, machine = build(name, ranks), flat(3, 2, 1)
        size = 8 * schedule.chunks
        ends, wanted = run(schedule, machine, 1, size), simulate(schedule, size, machine).seconds
        # Connections take turns at a port, whatever each of them holds up.
        assert max(ends) <= 1.02 * wanted

"""Late and slow ranks and links: by hand, and never quicker than without."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpiddp.errors import ConfigurationError
from mpiddp.schedules import registry
from mpiddp.schedules.cost import flat, simulate, split
from mpiddp.schedules.schedule import Transfer, all_reduce
from mpiddp.schedules.timeline import Disturbance, Timeline
from prices import ODD, build, close, machines, pieced_machines

QUIET = Disturbance()
PLAIN = flat(1, 1)


def run(schedule, disturbance=QUIET, machine=PLAIN, nodes=None, count=10):
    return list(Timeline(machine, nodes, disturbance).run(schedule, count))


def test_who_has_no_part_in_a_step_goes_on():
    # 0 sends to 1, who sends to 2: 11 s each. Rank 3 sends to 4 in the second step, at once.
    steps = [[Transfer(0, 1, 0, 1, False)],
             [Transfer(1, 2, 0, 1, False), Transfer(3, 4, 0, 1, False)]]  # fmt: skip
    schedule = all_reduce(5, 1, steps)
    assert run(schedule) == [11, 22, 22, 11, 11]
    assert run(schedule, Disturbance(delays={0: 5})) == [16, 27, 27, 11, 11]
    assert run(schedule, Disturbance(delays={4: 7})) == [11, 22, 22, 18, 18]
    assert run(schedule, Disturbance(slow_ranks={2: 3})) == [11, 44, 44, 11, 11]
    assert run(schedule, Disturbance(slow_links={(1, 0): 2})) == [22, 33, 33, 11, 11]


def test_what_arrives_is_taken_in_the_order_of_arrival():
    # Of ranks 0 to 2, which send to 3, the first is 25 s late: the others are heard meanwhile.
    schedule = all_reduce(4, 1, [[Transfer(rank, 3, 0, 1, True) for rank in range(3)]])
    assert run(schedule)[3] == 33
    assert run(schedule, Disturbance(delays={0: 25}))[3] == 36
    assert run(schedule, Disturbance(delays={0: 5}))[3] == 33


def test_sends_keep_their_order():
    schedule = all_reduce(4, 1, [[Transfer(0, rank, 0, 1, False) for rank in (1, 2, 3)]])
    assert run(schedule) == [33, 11, 22, 33]
    assert run(schedule, Disturbance(delays={1: 4})) == [37, 15, 26, 37]


def test_a_slow_rank_adds_slowly_and_a_slow_link_does_not():
    schedule = all_reduce(2, 1, [[Transfer(0, 1, 0, 1, True)]])
    machine = flat(1, 1, 0.5)
    assert run(schedule, machine=machine)[1] == 11 + 5
    assert run(schedule, Disturbance(slow_ranks={1: 2}), machine)[1] == 22 + 10
    assert run(schedule, Disturbance(slow_ranks={0: 2}), machine)[1] == 22 + 5
    assert run(schedule, Disturbance(slow_links={(0, 1): 2}), machine)[1] == 22 + 5


def test_links_are_those_of_nodes():
    schedule = all_reduce(4, 1, [[Transfer(1, 2, 0, 1, True), Transfer(0, 1, 0, 1, True)]])
    quiet, far, near = (
        run(schedule, Disturbance(slow_links=links), nodes=(2, 2))
        for links in ({}, {(0, 1): 2}, {(0, 0): 2})
    )
    assert (quiet[2], far[2], near[2]) == (11, 22, 11)
    assert (quiet[0], far[0], near[0]) == (11, 11, 22)


@settings(max_examples=60)
@given(
    name=st.sampled_from(registry.names()),
    ranks=st.integers(2, 12),
    hosts=st.integers(1, 12),
    count=st.integers(1, 300),
    machine=st.one_of(machines(), pieced_machines()),
)
def test_without_a_disturbance_nobody_ends_later_than_in_step(name, ranks, hosts, count, machine):
    nodes = split(ranks, min(hosts, ranks))
    schedule = build(name, ranks, nodes if name == "two-level" else None)
    ends = Timeline(machine, nodes).run(schedule, count)
    limit = 1 + 1e-9 if max(nodes) == 1 else 2  # A shared link may change the order.
    assert ends.max() <= limit * simulate(schedule, count, machine, nodes).seconds


@pytest.mark.parametrize("name", ["ring", "recursive-doubling", "one-shot", "direct", "central"])
def test_on_machines_where_all_are_alike_they_end_as_in_step(name):
    schedule = build(name, 8)
    ends = run(schedule, machine=flat(3, 2, 1), count=64)
    assert close(max(ends), simulate(schedule, 64, flat(3, 2, 1)).seconds)


@settings(max_examples=50)
@given(
    name=st.sampled_from(registry.names()),
    ranks=st.integers(2, 10),
    rank=st.integers(0, 9),
    delay=st.floats(0, 100),
    factor=st.floats(1, 10),
)
def test_a_disturbance_costs_something_and_a_delay_no_more_than_itself(
    name, ranks, rank, delay, factor
):
    schedule, rank = build(name, ranks), rank % ranks
    quiet = max(run(schedule, machine=ODD))
    late = max(run(schedule, Disturbance(delays={rank: delay}), ODD))
    assert quiet * (1 - 1e-9) <= late <= (quiet + delay) * (1 + 1e-9)
    slow = max(run(schedule, Disturbance(slow_ranks={rank: factor}), ODD))
    assert quiet * (1 - 1e-9) <= slow <= quiet * factor * (1 + 1e-9)


@pytest.mark.parametrize(
    ("disturbance", "problem"),
    [
        (Disturbance(delays={4: 1}), "no rank 4 among 4 ranks"),
        (Disturbance(slow_ranks={9: 2}), "no rank 9"),
        (Disturbance(slow_links={(0, 2): 2}), "no link 0-2 between 2 nodes"),
    ],
)
def test_what_is_not_there_cannot_be_slow(disturbance, problem):
    with pytest.raises(ConfigurationError, match=problem):
        run(build("ring", 4), disturbance, nodes=(2, 2))

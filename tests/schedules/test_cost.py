"""Prices by simulation, lower bounds, machines and nodes."""

from __future__ import annotations

import functools
import itertools
import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import oracle
from mpiddp.errors import ConfigurationError
from mpiddp.schedules import registry
from mpiddp.schedules.cost import (
    Machine,
    MessageCost,
    StepPrice,
    bound,
    check_nodes,
    flat,
    simulate,
    split,
)
from mpiddp.schedules.proof import prove
from mpiddp.schedules.schedule import MIRROR, Collective, Transfer, all_reduce
from prices import FULL, ODD, WITH_HALVES, build, close, machines

# ---- hand-computed ------------------------------------------------------------------------


def test_a_ring_of_three_by_hand():
    # 12 bytes in 3 chunks: 4 steps of 5 + 4·2 = 13 s, and in two of them 4·1 s for adding.
    run = simulate(build("ring", 3), 12, flat(5, 2, 1))
    assert [step.seconds for step in run.steps] == [17, 17, 13, 13]
    assert run.seconds == 60
    assert run.steps[0] == StepPrice(seconds=17, messages=3, sent=12, busiest=4)
    assert list(run.sent) == list(run.received) == [16, 16, 16]


def test_a_central_server_of_two_workers_by_hand():
    # The server hears two messages of 5 + 12·2 = 29 s and adds 24 bytes; then it sends as much.
    run = simulate(build("central", 3), 12, flat(5, 2, 1))
    assert [step.seconds for step in run.steps] == [2 * 29 + 24, 2 * 29]
    assert run.steps[0] == StepPrice(seconds=82, messages=2, sent=24, busiest=24)
    assert list(run.sent) == [12, 12, 24] and list(run.received) == [12, 12, 24]


@pytest.mark.parametrize(
    ("shared", "between"), [(None, 10 + 4 * 3), (3, 10 + 4 * 3), (1, 10 + 2 * 3), (2, 10 + 4 * 2)]
)
def test_two_levels_on_two_nodes_of_two_by_hand(shared, between):
    # Of 8 bytes, ranks of a node exchange 4, and two pairs exchange 2 bytes between the nodes,
    # twice: each in 10 + 2·3 s, if the nodes' links carry both pairs' 4 bytes in that time.
    machine = Machine(MessageCost(1, 1), MessageCost(10, 3), 0.5, shared)
    run = simulate(build("two-level", 4, (2, 2)), 8, machine, (2, 2))
    inside = 1 + 4
    wanted = [inside + 4 * 0.5, between + 2 * 0.5, between, inside]
    assert [step.seconds for step in run.steps] == wanted
    assert run.seconds == sum(wanted)


def test_ranks_of_a_node_share_its_link_each_way():
    # Node 0 is ranks 0 to 2: each sends 4 bytes out and 8 come in, for rank 2.
    out = [Transfer(rank, rank + 3, 0, 4, False) for rank in range(3)]
    into = [Transfer(6, 2, 0, 8, True)]
    schedule = all_reduce(7, 8, [out, into, out + into])
    machine = Machine(MessageCost(1, 0.5), MessageCost(2, 3), 1, 2)
    run = simulate(schedule, 8, machine, (3, 3, 1))
    # One rank takes 2 + 4·3 s, three of them keep the link busy for 2 + 12·2 s.
    # Rank 6 has its link alone: 2 + 8·3 s, and 8 s to add.
    assert [step.seconds for step in run.steps] == [26, 26 + 8, 26 + 8]
    alone = simulate(schedule, 8, machine)
    assert [step.seconds for step in alone.steps] == [14, 26 + 8, 26 + 8]
    inside = simulate(schedule, 8, machine, (7,))
    assert [step.seconds for step in inside.steps] == [3, 5 + 8, 5 + 8]


def test_a_node_hears_several_others_over_one_link():
    # Each of nodes 0 to 2 has its own link; node 3 hears 3·8 bytes over one: 2 + 24·2 s.
    step = [Transfer(rank, rank + 3, 0, 8, True) for rank in range(3)]
    machine = Machine(MessageCost(1, 0.5), MessageCost(2, 3), 1, 2)
    assert simulate(all_reduce(6, 8, [step]), 8, machine, (1, 1, 1, 3)).seconds == 50 + 8
    assert simulate(all_reduce(6, 8, [step]), 8, machine).seconds == 2 + 8 * 3 + 8


def test_messages_within_a_node_do_not_use_its_link():
    step = [Transfer(0, 1, 0, 1, False), Transfer(2, 4, 0, 1, False), Transfer(3, 5, 0, 1, False)]
    run = simulate(
        all_reduce(6, 1, [step]), 10, Machine(MessageCost(1, 4), MessageCost(2, 5), 0, 5), (4, 2)
    )
    # The first takes 1 + 10·4 s; the other two share a link: 2 + 20·5 s.
    assert run.seconds == 102


def test_a_rank_sends_one_message_at_a_time_but_hears_at_the_same_time():
    both = [Transfer(0, 1, 0, 1, False), Transfer(0, 2, 0, 1, False), Transfer(1, 0, 0, 1, False)]
    assert simulate(all_reduce(3, 1, [both]), 10, flat(1, 1)).seconds == 22
    assert simulate(all_reduce(3, 1, [both[:1] + both[2:]]), 10, flat(1, 1)).seconds == 11


def test_adding_follows_the_messages_of_its_own_rank():
    # Rank 0 sends 40 bytes and adds none, rank 1 hears 40 bytes; rank 2 hears 10 and adds them.
    step = [Transfer(0, 1, 0, 4, False), Transfer(1, 2, 0, 1, True)]
    assert simulate(all_reduce(3, 4, [step]), 40, flat(0, 1, 2)).seconds == 40
    assert simulate(all_reduce(3, 4, [step]), 40, flat(0, 1, 4)).seconds == 10 + 40


def test_items_are_never_cut():
    run = simulate(build("ring", 3), 4, flat(0, 1), item=8)
    # 4 elements in 3 chunks: 1, 1 and 2 of them; the two are sent in each step by somebody.
    assert [step.seconds for step in run.steps] == [16] * 4
    assert [step.sent for step in run.steps] == [32] * 4


@pytest.mark.parametrize("name", registry.names())
def test_nothing_costs_nothing(name):
    run = simulate(build(name, 6), 0, ODD)
    assert run.seconds == 0 and not run.sent.any() and not run.received.any()
    assert all(step == StepPrice(0, 0, 0, 0) for step in run.steps)


@pytest.mark.parametrize("name", registry.names())
@settings(max_examples=15)
@given(ranks=st.integers(2, 12), count=st.integers(1, 200), machine=machines())
def test_a_ragged_buffer_costs_between_the_multiples_of_its_chunks(name, ranks, count, machine):
    schedule = build(name, ranks)
    low, high = (
        parts * schedule.chunks
        for parts in (count // schedule.chunks, -(-count // schedule.chunks))
    )
    prices = [simulate(schedule, size, machine).seconds for size in (low, count, high)]
    assert prices[0] <= prices[1] * (1 + 1e-12) and prices[1] <= prices[2] * (1 + 1e-12)


@pytest.mark.parametrize("name", registry.names())
def test_all_that_is_sent_is_received(name):
    run = simulate(build(name, 9), 101, ODD, item=4)
    assert run.sent.sum() == run.received.sum() == sum(step.sent for step in run.steps)
    least = 2 * (len(build(name, 9).members) - 1) * 101 * 4
    assert (run.sent % 4 == 0).all() and run.sent.sum() >= least


# ---- lower bounds -------------------------------------------------------------------------


@settings(max_examples=250)
@given(
    name=st.sampled_from(FULL),
    nodes=st.lists(st.integers(1, 6), min_size=1, max_size=6),
    segments=st.integers(1, 3),
    count=st.integers(1, 100),
    machine=machines(),
)
def test_no_algorithm_beats_the_lower_bounds(name, nodes, segments, count, machine):
    schedule = build(f"{name}:segments={segments}", sum(nodes))
    limits = bound(count * 4, machine, nodes)
    price = simulate(schedule, count, machine, nodes, item=4).seconds
    assert limits.seconds <= price * (1 + 1e-12)
    assert limits.seconds == max(limits.latency, limits.bandwidth, limits.addition)


@settings(max_examples=250)
@given(
    nodes=st.lists(st.integers(1, 6), min_size=1, max_size=6),
    inner=st.sampled_from([name for name in FULL if name in WITH_HALVES]),
    outer=st.sampled_from(FULL),
    count=st.integers(1, 100),
    machine=machines(),
)
def test_two_levels_do_not_beat_the_lower_bounds(nodes, inner, outer, count, machine):
    schedule = build(f"two-level:inner={inner},outer={outer}", sum(nodes), tuple(nodes))
    price = simulate(schedule, count, machine, nodes).seconds
    assert bound(count, machine, nodes).seconds <= price * (1 + 1e-12)


@settings(max_examples=100)
@given(
    nodes=st.lists(st.integers(1, 6), min_size=2, max_size=6),
    servers=st.integers(1, 6),
    count=st.integers(1, 100),
    machine=machines(),
)
def test_servers_do_not_beat_the_lower_bounds_of_their_workers(nodes, servers, count, machine):
    schedule = build(f"central:servers={min(servers, sum(nodes) - 1)}", sum(nodes))
    limits = bound(count, machine, nodes, members=len(schedule.members))
    price = simulate(schedule, count, machine, nodes).seconds
    assert limits.seconds <= price * (1 + 1e-12)


def test_the_lower_bounds_of_two_workers_and_their_server_by_hand():
    # One message; the buffer leaves a worker once; one of three ranks adds at least a third of it.
    limits = bound(12, flat(5, 2, 1), (3,), members=2)
    assert (limits.latency, limits.bandwidth, limits.addition) == (5, 24, 4)
    assert bound(12, flat(5, 2, 1), (2,), members=1).seconds == 0


@settings(max_examples=150)
@given(
    nodes=st.lists(st.integers(1, 6), min_size=1, max_size=6),
    name=st.sampled_from([*WITH_HALVES, "central"]),
    kind=st.sampled_from(list(MIRROR)),
    count=st.integers(1, 100),
    machine=machines(),
)
def test_no_half_beats_the_lower_bounds_of_its_collective(nodes, name, kind, count, machine):
    try:
        half = replace(registry.parse(name), collective=kind).build(sum(nodes))
    except ConfigurationError:
        return
    price = simulate(half, count, machine, nodes).seconds
    assert bound(count, machine, nodes, len(half.members), kind).seconds <= price * (1 + 1e-12)


@pytest.mark.parametrize(
    ("name", "kind"),
    [("ring", Collective.REDUCE_SCATTER), ("ring", Collective.ALL_GATHER),
     ("naive-ring:segments=16", Collective.BROADCAST)],
)  # fmt: skip
def test_some_halves_meet_the_lower_bounds_of_their_collective(name, kind):
    half = replace(registry.parse(name), collective=kind).build(16)
    limits = bound(1600, flat(3, 2, 1), (1,) * 16, 16, kind)
    # Of 16 segments the last one waits for the first to be 14 ranks away.
    late = (16 + 14) / 16 if kind is Collective.BROADCAST else 1
    assert limits.bandwidth * late == simulate(half, 1600, flat(0, 2)).seconds
    assert limits.addition == simulate(half, 1600, flat(0, 0, 1)).seconds
    assert limits.latency == 3 * 4


def test_some_algorithms_meet_the_lower_bounds():
    nodes = (1,) * 16
    limits = bound(1600, flat(3, 2, 1), nodes)
    assert limits.latency == simulate(build("recursive-doubling", 16), 1600, flat(3, 0)).seconds
    assert limits.bandwidth == simulate(build("ring", 16), 1600, flat(0, 2)).seconds
    assert limits.addition == simulate(build("ring", 16), 1600, flat(0, 0, 1)).seconds


@pytest.mark.parametrize(
    ("members", "rounds"),
    [(1, 0), (2, 1), (3, 2), (4, 2), (5, 3), (8, 3), (9, 4), (27, 5), (64, 6)],
)
def test_a_message_at_most_doubles_the_ranks_that_know_a_contribution(members, rounds):
    for servers in (0, 1):
        limits = bound(100, flat(7, 0), (1,) * (members + servers), members)
        assert limits.latency == 7 * rounds
    limits = bound(100, Machine(MessageCost(7, 0), MessageCost(7, 0)), (members,))
    assert limits.latency == 7 * rounds


def test_one_rank_alone_has_no_lower_bound_nor_has_nothing():
    assert bound(100, ODD, (1,)).seconds == bound(0, ODD, (1,) * 4).seconds == 0


def many_doors():
    """Three nodes of four ranks, where two ranks of each node tell the two other nodes its sum
    at once, and the other two listen."""
    add, copy = (functools.partial(pair_up, reduce=reduce) for reduce in (True, False))
    collect = [add((node, rank), (node, 0)) for node in range(3) for rank in (1, 2, 3)]
    tell_second = [copy((node, 0), (node, 1)) for node in range(3)]
    others = [[other for other in range(3) if other != node] for node in range(3)]
    # Ranks 2 and 3 of a node listen to the lower and to the higher of the other nodes.
    doors = [
        copy((other, others[other].index(node)), (node, 2 + place))
        for node in range(3)
        for place, other in enumerate(others[node])
    ]
    # (first + second) + third on each node, wherever they are.
    sums = [
        [add((0, 2), (0, 0)), add((1, 2), (1, 0)), add((2, 3), (2, 2))],
        [add((0, 3), (0, 0)), add((1, 3), (1, 0)), add((2, 2), (2, 0))],
    ]
    spread = [copy((node, 0), (node, rank)) for node in range(3) for rank in (1, 2, 3)]
    return all_reduce(12, 1, [collect, tell_second, doors, *sums, spread])


def pair_up(src, dst, reduce):
    return Transfer(4 * src[0] + src[1], 4 * dst[0] + dst[1], 0, 1, reduce)


def test_a_node_with_several_ranks_can_hear_several_others_at_once():
    """So the messages between nodes that must follow each other are fewer than ⌈lg nodes⌉."""
    schedule, nodes = many_doors(), (4, 4, 4)
    prove(schedule)
    oracle.check(schedule, 5, 0)
    machine = Machine(MessageCost(0, 0), MessageCost(1, 0))
    price = simulate(schedule, 5, machine, nodes).seconds
    assert price == 1
    assert bound(5, machine, nodes).seconds <= price


@pytest.mark.parametrize(
    ("nodes", "rounds"),
    [((4,) * 5, 1), ((4,) * 6, 2), ((4,) * 25, 2), ((4, 1, 1, 1, 1), 1), ((1,) * 5, 3), ((9,), 0)],
)
def test_a_node_of_four_ranks_knows_five_times_as_many_nodes_after_each_message(nodes, rounds):
    assert bound(1, Machine(MessageCost(0, 0), MessageCost(1, 0)), nodes).latency == rounds


# ---- machines and nodes -------------------------------------------------------------------


@pytest.mark.parametrize("figure", [-1.0, math.inf, math.nan])
@pytest.mark.parametrize("place", range(6))
def test_figures_of_a_machine_must_be_sensible(place, figure):
    a, b, c, d, gamma, shared = [figure if n == place else 1.0 for n in range(6)]
    with pytest.raises(ConfigurationError, match="latencies and seconds per byte must be >= 0"):
        Machine(MessageCost(a, b), MessageCost(c, d), gamma, shared)


def test_a_shared_link_cannot_be_slower_than_one_rank():
    with pytest.raises(ConfigurationError, match=r"cannot need 3 s"):
        Machine(MessageCost(1, 1), MessageCost(1, 2), 0, 3)
    assert Machine(MessageCost(1, 1), MessageCost(1, 2)).uplink == 2
    assert Machine(MessageCost(1, 1), MessageCost(1, 2), 0, 0).uplink == 0


@given(st.integers(1, 300), st.integers(1, 300))
def test_ranks_are_split_over_nodes_as_evenly_as_they_go(ranks, nodes):
    if nodes > ranks:
        with pytest.raises(ConfigurationError, match=f"{ranks} ranks go on 1 to {ranks} nodes"):
            split(ranks, nodes)
        return
    sizes = split(ranks, nodes)
    assert (len(sizes), sum(sizes)) == (nodes, ranks) and max(sizes) - min(sizes) <= 1


def test_nodes_that_are_not_given_have_one_rank_each():
    assert check_nodes(3, None) == (1, 1, 1)
    both = [simulate(build("ring", 4), 8, ODD, nodes).seconds for nodes in (None, (1,) * 4)]
    assert both[0] == both[1]


def test_a_price_does_not_depend_on_the_order_of_messages():
    for name, ranks in itertools.product(("direct", "double-tree"), (5, 8)):
        schedule = build(name, ranks)
        turned = replace(schedule, steps=tuple(step[::-1] for step in schedule.steps))
        first, second = (simulate(one, 999, ODD, split(ranks, 2)) for one in (schedule, turned))
        assert close(first.seconds, second.seconds)


@pytest.mark.parametrize("count", [-1, -8])
def test_a_buffer_has_no_less_than_nothing(count):
    with pytest.raises(ConfigurationError, match="elements must be >= 0"):
        simulate(registry.parse("ring").build(4), count, flat(1, 1))

"""Prices by simulation, lower bounds, machines, nodes; messages whose cost changes with size."""

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpiddp.errors import ConfigurationError
from mpiddp.schedules import registry
from mpiddp.schedules.cost import Machine, MessageCost, StepPrice, bound, flat, simulate, split
from mpiddp.schedules.machine import Piece
from mpiddp.schedules.schedule import Collective, Transfer, all_reduce
from prices import FULL, ODD, WITH_HALVES, build, machines, pieced_machines


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
    assert [step.busiest for step in run.steps] == [24, 24]
    assert list(simulate(build("naive-ring", 3), 12, flat(5, 2)).sent) == [24, 12, 12]
    assert list(simulate(build("naive-ring", 3), 12, flat(5, 2)).received) == [12, 24, 12]


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


def sends(*pairs, chunks=1, reduce=False):
    """A step: who sends so many chunks to whom."""
    return [Transfer(src, dst, 0, chunks, reduce) for src, dst in pairs]


OUT, INTO = sends((0, 3), (1, 4), (2, 5), chunks=4), sends((6, 2), chunks=8, reduce=True)
LINK = Machine(MessageCost(1, 0.5), MessageCost(2, 3), 1, 2)
BOTH = sends((0, 1), (0, 2), (1, 0))
FOUR = [*sends((0, 1), chunks=4), *sends((1, 2), reduce=True)]


@pytest.mark.parametrize(
    ("schedule", "size", "machine", "nodes", "seconds"),
    [
        # Node 0 is ranks 0 to 2, each of which sends 4 bytes: one takes 2 + 4·3 s, but three of
        # them keep the link busy for 2 + 12·2 s. Rank 6 has its link alone: 2 + 8·3 s, adding 8 s.
        (all_reduce(7, 8, [OUT, INTO, OUT + INTO]), 8, LINK, (3, 3, 1), [26, 26 + 8, 26 + 8]),
        (all_reduce(7, 8, [OUT, INTO, OUT + INTO]), 8, LINK, None, [14, 26 + 8, 26 + 8]),
        # Each of nodes 0 to 2 has its own link; node 3 hears 3·8 bytes over one.
        (all_reduce(6, 4, [OUT]), 8, LINK, (1, 1, 1, 3), [2 + 24 * 2]),
        # The first takes 1 + 10·4 s; the other two share a link.
        (
            all_reduce(6, 1, [sends((0, 1), (2, 4), (3, 5))]),
            *(10, Machine(MessageCost(1, 4), MessageCost(2, 5), 0, 5), (4, 2), [2 + 20 * 5]),
        ),
        # A rank sends one message at a time, but hears at the same time.
        (all_reduce(3, 1, [BOTH, BOTH[:1] + BOTH[2:]]), 10, flat(1, 1), None, [22, 11]),
        # Rank 1 hears 40 bytes while rank 2 hears 10 and adds them.
        (all_reduce(3, 4, [FOUR]), 40, flat(0, 1, 2), None, [40]),
        (all_reduce(3, 4, [FOUR]), 40, flat(0, 1, 4), None, [10 + 40]),
    ],
)
def test_single_steps_by_hand(schedule, size, machine, nodes, seconds):
    run = simulate(schedule, size, machine, nodes)
    assert [step.seconds for step in run.steps] == seconds


def test_items_are_never_cut():
    run = simulate(build("ring", 3), 4, flat(0, 1), item=8)
    # 4 elements in 3 chunks: 1, 1 and 2 of them; the two are sent in each step by somebody.
    assert [step.seconds for step in run.steps] == [16] * 4
    assert [step.sent for step in run.steps] == [32] * 4


@pytest.mark.parametrize("name", registry.names())
def test_all_that_is_sent_is_received_and_nothing_costs_nothing(name):
    empty = simulate(build(name, 6), 0, ODD)
    assert set(empty.steps) == {StepPrice(0, 0, 0, 0)} and not empty.received.any()
    run = simulate(build(name, 9), 101, ODD, item=4)
    assert run.sent.sum() == run.received.sum() == sum(step.sent for step in run.steps)
    least = 2 * (len(build(name, 9).members) - 1) * 101 * 4
    assert (run.sent % 4 == 0).all() and run.sent.sum() >= least


LEVELS = st.sampled_from([name for name in FULL if name in WITH_HALVES])


@settings(max_examples=250)
@given(
    text=st.one_of(
        st.builds("{}:segments={}".format, st.sampled_from(FULL), st.integers(1, 3)),
        st.builds("two-level:inner={},outer={}".format, LEVELS, st.sampled_from(FULL)),
        st.builds("central:servers={}".format, st.integers(1, 6)),
    ),
    nodes=st.lists(st.integers(1, 6), min_size=1, max_size=6),
    kind=st.sampled_from(list(Collective)),
    count=st.integers(1, 1000),
    machine=machines() | pieced_machines(),
)
def test_nothing_beats_the_lower_bounds_of_its_collective(text, nodes, kind, count, machine):
    choice = replace(registry.parse(text), collective=kind)
    try:
        schedule = choice.build(sum(nodes), nodes)
    except ConfigurationError:
        return
    limits = bound(count * 4, machine, nodes, len(schedule.members), kind)
    price = simulate(schedule, count, machine, nodes, item=4).seconds
    assert limits.seconds <= price * (1 + 1e-9)
    assert limits.seconds == max(limits.latency, limits.bandwidth, limits.addition)


def test_the_lower_bounds_of_two_workers_and_their_server_by_hand():
    # One message; the buffer leaves a worker once; one of three ranks adds at least a third of it.
    limits = bound(12, flat(5, 2, 1), (3,), members=2)
    assert (limits.latency, limits.bandwidth, limits.addition) == (5, 24, 4)
    assert bound(12, flat(5, 2, 1), (2,), members=1).seconds == 0
    # One rank alone, and a buffer of nothing.
    assert bound(100, ODD, (1,)).seconds == bound(0, ODD, (1,) * 4).seconds == 0


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("ring", Collective.ALL_REDUCE),
        ("ring", Collective.REDUCE_SCATTER),
        ("ring", Collective.ALL_GATHER),
        ("naive-ring:segments=16", Collective.BROADCAST),
    ],
)
def test_some_meet_the_lower_bounds_of_their_collective(name, kind):
    half = replace(registry.parse(name), collective=kind).build(16)
    limits = bound(1600, flat(3, 2, 1), (1,) * 16, 16, kind)
    # Of 16 segments the last one waits for the first to be 14 ranks away.
    late = (16 + 14) / 16 if kind is Collective.BROADCAST else 1
    assert limits.bandwidth * late == simulate(half, 1600, flat(0, 2)).seconds
    assert limits.addition == simulate(half, 1600, flat(0, 0, 1)).seconds
    assert limits.latency == 3 * 4


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


@pytest.mark.parametrize(
    ("nodes", "rounds"),
    [((4,) * 5, 1), ((4,) * 6, 2), ((4,) * 25, 2), ((4, 1, 1, 1, 1), 1), ((1,) * 5, 3), ((9,), 0)],
)
def test_a_node_of_four_ranks_knows_five_times_as_many_nodes_after_each_message(nodes, rounds):
    assert bound(1, Machine(MessageCost(0, 0), MessageCost(1, 0)), nodes).latency == rounds


def test_figures_of_a_machine_must_be_sensible():
    for place, figure in itertools.product(range(6), (-1.0, math.inf, math.nan)):
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


def test_a_buffer_has_no_less_than_nothing():
    with pytest.raises(ConfigurationError, match="elements must be >= 0"):
        simulate(build("ring", 4), -1, flat(1, 1))


EAGER = MessageCost(1, 2, (Piece(10, 100, 0.5), Piece(100, -50, 4)))
"""1 + 2s below 10 bytes, 100 + s/2 below 100, 4s - 50 from there on."""


def test_each_size_has_the_line_of_its_piece():
    sizes = np.array([0, 9, 10, 99, 100, 1000])
    assert list(EAGER.seconds(sizes)) == [1, 19, 105, 149.5, 350, 3950]
    assert [EAGER.seconds(size) for size in (0, 9, 10)] == [1, 19, 105]
    assert list(EAGER.occupation(sizes)) == [0, 18, 104, 148.5, 349, 3949]
    assert EAGER.least_latency == 1
    assert EAGER.least_per_byte() == 0.5


def test_less_for_a_byte_at_a_pieces_start_than_anywhere_on_its_line():
    cost = MessageCost(100, 3, (Piece(100, -100, 2.5),))
    assert cost.least_per_byte() == (2.5 * 100 - 100) / 100
    assert cost.least_per_byte(apart=100) == 0.5


def test_what_is_added_has_a_cost_by_its_size():
    machine = Machine(MessageCost(0, 0), MessageCost(0, 0), adding=EAGER)
    # One-shot: each of 3 ranks adds two buffers of 20 bytes, each by itself.
    assert simulate(build("one-shot", 3), 20, machine).seconds == 2 * 110
    form = registry.parse("one-shot").closed_form((1, 1, 1))
    assert form.seconds(20, machine) == 2 * 110


def test_ranks_of_a_node_wait_for_its_link_for_what_lies_beyond_latency():
    # Two ranks of each node send 8 bytes to the other node: 1 + 2·16 s, not 1 + 16.
    machine = Machine(MessageCost(0, 0), EAGER)
    run = simulate(build("two-level:inner=direct", 4, (2, 2)), 32, machine, (2, 2))
    assert [step.seconds for step in run.steps] == [0, 33, 33, 0]


@settings(max_examples=30)
@given(
    hosts=st.integers(1, 5),
    size=st.integers(1, 5),
    machine=pieced_machines(),
    multiple=st.integers(1, 900),
)
def test_the_closed_form_of_a_ring_holds_where_the_network_is_quicker(
    hosts, size, machine, multiple
):
    nodes, schedule = (size,) * hosts, build("ring", hosts * size)
    form = registry.parse("ring").closed_form(nodes)
    run = simulate(schedule, multiple * schedule.chunks, machine, nodes)
    found = form.seconds(multiple * schedule.chunks, machine)
    assert math.isclose(found, run.seconds, rel_tol=1e-9)


@pytest.mark.parametrize(
    "piece",
    [Piece(0, 1, 1), Piece(-1, 1, 1), Piece(10, -100, 1), Piece(10, 1, -1), Piece(math.nan, 1, 1)],
)
def test_pieces_that_no_machine_has_are_refused(piece):
    with pytest.raises(ConfigurationError, match="must be >= 0"):
        Machine(MessageCost(1, 1), MessageCost(1, 1, (piece,)))

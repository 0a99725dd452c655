"""Prices: by simulation, closed forms, the literature; lower bounds, machines, nodes, pieces."""

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpiddp.errors import ConfigurationError
from mpiddp.schedules import registry
from mpiddp.schedules.cost import (
    ClosedForm,
    Load,
    Machine,
    MessageCost,
    Phase,
    StepPrice,
    bound,
    flat,
    simulate,
    split,
)
from mpiddp.schedules.machine import Piece
from mpiddp.schedules.schedule import Collective, Transfer, all_reduce
from prices import FULL, ODD, WITH_HALVES, build, close, machines, pieced_machines


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
    # On nodes of their own they gain nothing from quick messages within a node.
    quick = replace(flat(5, 2, 1), inside=MessageCost(0, 0))
    assert bound(12, quick, (1,) * 3, members=2) == limits
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


def check_form(text, nodes, machine, multiple=4):
    """The closed form is the simulation on these nodes; answers False if there is no form."""
    choice = registry.parse(text)
    form = choice.closed_form(nodes)
    if form is None:
        return False
    schedule = build(text, sum(nodes), nodes if choice.algorithm.knows_nodes else None)
    count = multiple * schedule.chunks
    run = simulate(schedule, count, machine, nodes, item=4)
    assert math.isclose(form.seconds(count * 4, machine), run.seconds, rel_tol=1e-9)
    assert form.steps == len(run.steps), (text, nodes)
    return True


SPARE_FORMS = {
    # The latency variant and the butterfly are priced as what they improve on.
    "swing:variant=latency": "recursive-doubling",
    "bine:variant=butterfly": "halving-doubling",
}
NOT_ON_ALL_NODES = {
    "recursive-doubling", "halving-doubling", "binomial-tree", "double-tree", "bine",
}  # fmt: skip
"""They have no closed form on nodes whose numbers of ranks do not suit them."""


def may_have_none(name, ranks, size):
    """Whether there need be no closed form on nodes of ``size`` ranks."""
    is_odd = ranks % 2 and ranks > 1
    return (name in NOT_ON_ALL_NODES and 1 < size < ranks) or (name == "swing" and is_odd)


@pytest.mark.parametrize(
    "name", [*registry.names(), *SPARE_FORMS, "pat:aggregation=1", "pat:aggregation=4"]
)
def test_the_closed_form_is_the_simulation_on_nodes_of_any_size(name):
    for ranks in (*range(1, 17), 24, 33, 48, 64):
        for size in [size for size in range(1, ranks + 1) if ranks % size == 0]:
            has_form = check_form(name, (size,) * (ranks // size), ODD, multiple=1)
            assert has_form or may_have_none(name, ranks, size), (ranks, size)


@pytest.mark.parametrize("name", registry.names())
@settings(max_examples=15)
@given(
    hosts=st.integers(1, 8),
    size=st.integers(1, 5),
    machine=machines() | pieced_machines(is_ordered=True),
    multiple=st.integers(1, 900),
)
def test_the_closed_form_is_the_simulation_on_any_machine(name, hosts, size, machine, multiple):
    has_form = check_form(name, (size,) * hosts, machine, multiple)
    assert has_form or may_have_none(name, hosts * size, size)


@settings(max_examples=100)
@given(
    hosts=st.integers(1, 8), size=st.integers(1, 8), servers=st.integers(1, 12),
    name=st.sampled_from(["direct", "central"]), machine=machines(),
)  # fmt: skip
def test_the_closed_form_knows_the_number_of_servers(hosts, size, servers, name, machine):
    ranks = hosts * size
    servers = min(servers, ranks if name == "direct" else max(ranks // 2, 1))
    has_form = check_form(f"{name}:servers={servers}", (size,) * hosts, machine)
    on_two_nodes = size < servers < ranks and hosts > 1 and size > 1
    assert has_form or on_two_nodes


@pytest.mark.parametrize(
    ("inner", "outer"),
    [*((inner, "ring") for inner in WITH_HALVES), *(("direct", outer) for outer in FULL)],
)
@settings(max_examples=8)
@given(hosts=st.integers(1, 6), size=st.integers(1, 6), machine=machines())
def test_any_two_levels_have_a_closed_form(inner, outer, hosts, size, machine):
    text = f"two-level:inner={inner},outer={outer}"
    is_odd = may_have_none(inner, size, 1) or may_have_none(outer, hosts, 1)
    assert check_form(text, (size,) * hosts, machine) or is_odd


@pytest.mark.parametrize(
    ("text", "nodes"),
    [
        # Nodes that differ; segments; more servers than workers; very large nodes.
        ("two-level", (2, 3)), ("ring", (2, 3)), ("ring:segments=2", (1, 1)),
        ("central:servers=3", (1,) * 5), ("two-level", (4096,) * 16),
    ],
)  # fmt: skip
def test_some_have_no_closed_form(text, nodes):
    assert registry.parse(text).closed_form(nodes) is None


def test_a_closed_form_by_hand():
    assert registry.parse("two-level").closed_form((256,) * 256) is not None
    # Three steps of one message near and two far, on a link that four ranks share.
    phase = Phase(3, Load(1, 0.5), Load(2, 0.25), link=4, added=0.125)
    machine = Machine(MessageCost(1, 2), MessageCost(10, 20), 3, 5)
    assert phase.seconds(16, machine) == 3 * (10 + 4 * 16 * 5 + 2 * 3)
    assert phase.seconds(16, replace(machine, shared=1)) == 3 * (1 + 8 * 2 + 20 + 4 * 20 + 2 * 3)
    form = ClosedForm((phase, Phase(1, near=Load(1, 1)), Phase(0, near=Load(9, 9), added=9)))
    assert form.steps == 4
    assert form.seconds(16, machine) == phase.seconds(16, machine) + 1 + 16 * 2
    assert (form.near, form.far, form.added) == (Load(4, 2.5), Load(6, 0.75), 0.375)


def lg(n):
    return math.log2(n)


LITERATURE = {
    # Patarasuk and Yuan 2009; Thakur et al. 2005, "ring".
    "ring": lambda n, a, b, c: 2 * (n - 1) * a + 2 * (n - 1) / n * b + (n - 1) / n * c,
    # A chain there (n − 1 messages of S, each added) and round again (n − 1 messages of S).
    "naive-ring": lambda n, a, b, c: (n - 1) * (a + b + c) + (n - 1) * (a + b),
    # Thakur et al. 2005: a binomial reduce and a binomial broadcast.
    "binomial-tree": lambda n, a, b, c: math.ceil(lg(n)) * (2 * a + 2 * b + c),
    "one-shot": lambda n, a, b, c: (n - 1) * (a + b + c),
    # Chan et al. 2007 for a reduce-scatter and a gathering that need one step each.
    "direct": lambda n, a, b, c: 2 * (n - 1) * a + 2 * (n - 1) / n * b + (n - 1) / n * c,
    # Li et al. 2014, one server for n − 1 workers.
    "central": lambda n, a, b, c: 2 * (n - 1) * (a + b) + (n - 1) * c,
    "gather-broadcast": lambda n, a, b, c: 2 * (n - 1) * (a + b) + (n - 1) * c,
    # Jeaugey 2025: as many steps as Bruck's, n − 1 chunks each way.
    "pat": lambda n, a, b, c: 2 * math.ceil(lg(n)) * a + (n - 1) / n * (2 * b + c),
    # De Sensi et al. 2025: a binomial tree's.
    "bine": lambda n, a, b, c: math.ceil(lg(n)) * (2 * a + 2 * b + c),
}
POWERS_OF_TWO = {
    # Thakur et al. 2005.
    "recursive-doubling": lambda n, a, b, c: lg(n) * (a + b + c),
    "halving-doubling": lambda n, a, b, c: 2 * lg(n) * a + (n - 1) / n * (2 * b + c),
    # De Sensi et al. 2024: Rabenseifner's.
    "swing": lambda n, a, b, c: 2 * lg(n) * a + (n - 1) / n * (2 * b + c),
    # The root of 2^k ranks has one child, all other inner nodes have two.
    "double-tree": lambda n, a, b, c: (2 * lg(n) - 1) * (2 * a + b + c / 2),
}
OTHER_NUMBERS = {
    # With f = ⌊lg n⌋ and p = 2^f; a whole buffer in and out beside what p ranks do.
    "recursive-doubling": lambda n, a, b, c: (
        (math.floor(lg(n)) + 2) * (a + b) + (math.floor(lg(n)) + 1) * c
    ),
    "swing": lambda n, a, b, c: 2 * math.ceil(lg(n)) * a + (n - 1) / n * (2 * b + c),
    "halving-doubling": lambda n, a, b, c: (
        2 * (math.floor(lg(n)) + 1) * a + (2 - 2.0 ** -math.floor(lg(n))) * (2 * b + c)
    ),
    "double-tree": lambda n, a, b, c: 2 * math.floor(lg(n)) * (2 * a + b + c / 2),
}


@pytest.mark.parametrize(
    ("name", "formula", "numbers"),
    [
        *((*each, (2, 3, 4, 5, 7, 8, 12, 16, 31, 32, 33)) for each in LITERATURE.items()),
        *((*each, (2, 4, 8, 16, 32, 64)) for each in POWERS_OF_TWO.items()),
        *((name, formula, (6, 10, 12, 62) if name == "swing" else (3, 5, 6, 7, 9, 12, 31, 33))
          for name, formula in OTHER_NUMBERS.items()),
        *((text, POWERS_OF_TWO[name], (2, 4, 32)) for text, name in SPARE_FORMS.items()),
        *((text, OTHER_NUMBERS[name], (3, 6, 33)) for text, name in SPARE_FORMS.items()),
        # Messages of fewer chunks take more steps.
        *((f"pat:aggregation={most}",
           lambda n, a, b, c, t=trees: 2 * (n // t - 1 + lg(t)) * a + (n - 1) / n * (2 * b + c),
           (8, 16, 32, 64)) for most, trees in ((1, 1), (2, 2), (4, 4), (9, 8))),
    ],
)  # fmt: skip
def test_the_price_is_that_of_the_literature(name, formula, numbers):
    for ranks, (a, b, c) in itertools.product(numbers, ((1, 0, 0), (0, 1, 0), (0, 0, 1))):
        schedule = build(name, ranks)
        size = 64 * schedule.chunks
        found = simulate(schedule, size, flat(a, b, c)).seconds
        assert close(found, formula(ranks, a, size * b, size * c)), (name, ranks)


def test_every_algorithm_is_compared_to_a_formula():
    assert {*LITERATURE, *POWERS_OF_TWO, "two-level"} == set(registry.names())


@pytest.mark.parametrize(("hosts", "size"), [(2, 2), (2, 8), (3, 5), (8, 4), (16, 2)])
def test_the_price_of_two_levels_is_the_one_that_is_documented(hosts, size):
    # Direct inside and ring between, over links that ranks share without any gain.
    schedule, nodes = build("two-level", hosts * size, (size,) * hosts), (size,) * hosts
    bytes_ = 8 * schedule.chunks
    machine = Machine(MessageCost(3, 2), MessageCost(7, 5), 0.25)
    inside = 2 * (size - 1) * 3 + (size - 1) / size * bytes_ * (2 * 2 + 0.25)
    between = 2 * (hosts - 1) * 7 + 2 * (hosts - 1) / hosts * bytes_ * 5
    between += (hosts - 1) / (hosts * size) * bytes_ * 0.25
    run = simulate(schedule, bytes_, machine, nodes)
    assert close(run.seconds, inside + between) and len(run.steps) == 2 * hosts


BUSIEST = {
    "ring": lambda n: 2 * (n - 1) / n, "naive-ring": lambda n: 2,
    "binomial-tree": lambda n: math.ceil(lg(n)), "double-tree": lambda n: 2,
    "one-shot": lambda n: n - 1, "direct": lambda n: 2 * (n - 1) / n, "central": lambda n: n - 1,
    "gather-broadcast": lambda n: n - 1, "pat": lambda n: 2 * (n - 1) / n,
    "bine": lambda n: math.ceil(lg(n)), "recursive-doubling": lg,
    "halving-doubling": lambda n: 2 * (n - 1) / n, "swing": lambda n: 2 * (n - 1) / n,
}  # fmt: skip


@pytest.mark.parametrize("name", BUSIEST)
def test_the_busiest_rank_sends_as_much_as_is_documented(name):
    for ranks in (16,) if name in POWERS_OF_TWO else (4, 5, 7, 8, 12, 16, 33):
        schedule = build(name, ranks)
        sent = simulate(schedule, 8 * schedule.chunks, flat(1, 1)).sent
        assert close(sent.max() / (8 * schedule.chunks), BUSIEST[name](ranks)), ranks


@pytest.fixture
def no_simulation(monkeypatch):
    def refuse(*_, **__):
        raise AssertionError("it was simulated, or built")

    monkeypatch.setattr(registry, "simulate", refuse)
    monkeypatch.setattr(registry.Choice, "build", refuse)


@pytest.mark.usefixtures("no_simulation")
@pytest.mark.parametrize("name", registry.names())
def test_65536_ranks_are_priced_by_the_closed_form(name):
    price = registry.parse(name).prices([2**30], ODD, (1,) * 65536)[0]
    assert (price.source, price.simulation) == ("closed form", None)
    assert price.seconds == price.form.seconds(2**30, ODD) > 0
    formula = {**LITERATURE, **POWERS_OF_TWO, "two-level": LITERATURE["ring"]}[name]
    # One rank on each node: its port and its node's link carry the same, and the port is slower.
    alpha, beta = ODD.between.latency, ODD.between.seconds_per_byte
    assert close(price.seconds, formula(65536, alpha, 2**30 * beta, 2**30 * ODD.addition))


@pytest.mark.usefixtures("no_simulation")
@pytest.mark.parametrize("text", ["double-tree", "ring:segments=2", "direct:servers=9"])
def test_what_has_no_closed_form_is_not_priced_at_65536_ranks(text):
    words = f"{text} has no closed form for 65536 ranks on 8192 nodes, and more than 1024 are not"
    with pytest.raises(ConfigurationError, match=words):
        registry.parse(text).prices([2**30], ODD, (8,) * 8192)[0]


def test_the_last_number_of_ranks_that_is_simulated_is_1024():
    choice, machine = registry.parse("binomial-tree"), flat(1, 0)
    assert choice.prices([4], machine, (1,) * 1024)[0].source == "simulated"
    assert choice.prices([4], machine, (1,) * 1025)[0].source == "closed form"


def test_a_price_rounds_the_buffer_down_to_whole_elements():
    choice = registry.parse("one-shot")
    assert choice.prices([11], flat(0, 1), (1, 1))[0].seconds == 8
    assert choice.prices([11], flat(0, 1), (1, 1), item=2)[0].seconds == 10
    # Where nothing is simulated, alike.
    assert choice.prices([11], flat(0, 1), (1,) * 1025)[0].seconds == 1024 * 8

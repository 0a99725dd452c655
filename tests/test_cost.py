"""Prices: simulation, closed forms, lower bounds, and the formulas of the literature."""

from __future__ import annotations

import functools
import itertools
import math
from dataclasses import replace

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

import oracle
from mpiddp.collectives import registry
from mpiddp.collectives.closed_form import ClosedForm, Load, Phase
from mpiddp.collectives.cost import (
    Link,
    Machine,
    StepPrice,
    bound,
    check_nodes,
    flat,
    simulate,
    split,
)
from mpiddp.collectives.proof import prove
from mpiddp.collectives.schedule import Transfer, all_reduce, halve
from mpiddp.errors import ConfigurationError

WITH_HALVES = tuple(name for name in registry.names() if registry.parse(name).build(4).owners)
FULL = tuple(
    name
    for name in registry.names()
    if name != "two-level" and len(registry.parse(name).build(5).members) == 5
)
"""They leave nobody out, so that they may connect nodes, and lower bounds hold for them."""
ODD = Machine(Link(3e-6, 7e-11), Link(11e-6, 13e-10), 17e-12, 5e-10)


def close(found, wanted):
    return math.isclose(found, wanted, rel_tol=1e-12)


@st.composite
def machines(draw):
    """All that a Machine may be, within what floating point multiplies without loss."""
    figures = st.one_of(st.just(0.0), st.floats(1e-30, 1e3))
    latency, per_byte, more, further, gamma = (draw(figures) for _ in range(5))
    far = Link(latency + more, per_byte + further)
    shared = draw(
        st.one_of(st.none(), st.floats(0, 1).map(lambda part: part * far.seconds_per_byte))
    )
    return Machine(Link(latency, per_byte), far, gamma, shared)


@functools.cache
def build(text, ranks, nodes=None):
    return registry.parse(text).build(ranks, nodes)


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
    machine = Machine(Link(1, 1), Link(10, 3), 0.5, shared)
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
    machine = Machine(Link(1, 0.5), Link(2, 3), 1, 2)
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
    machine = Machine(Link(1, 0.5), Link(2, 3), 1, 2)
    assert simulate(all_reduce(6, 8, [step]), 8, machine, (1, 1, 1, 3)).seconds == 50 + 8
    assert simulate(all_reduce(6, 8, [step]), 8, machine).seconds == 2 + 8 * 3 + 8


def test_messages_within_a_node_do_not_use_its_link():
    step = [Transfer(0, 1, 0, 1, False), Transfer(2, 4, 0, 1, False), Transfer(3, 5, 0, 1, False)]
    run = simulate(all_reduce(6, 1, [step]), 10, Machine(Link(1, 4), Link(2, 5), 0, 5), (4, 2))
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
@settings(max_examples=15, deadline=None)
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


# ---- the closed forms ---------------------------------------------------------------------


def check_form(text, nodes, machine, multiple=4, item=4):
    """The closed form is the simulation on these nodes; answers False if there is no form."""
    choice = registry.parse(text)
    form = choice.closed_form(nodes)
    if form is None:
        return False
    schedule = build(text, sum(nodes), nodes if choice.algorithm.knows_nodes else None)
    count = multiple * schedule.chunks
    run = simulate(schedule, count, machine, nodes, item=item)
    assert close(form.seconds(count * item, machine), run.seconds), (text, nodes)
    assert form.steps == len(run.steps), (text, nodes)
    return True


def divisors(ranks):
    return [size for size in range(1, ranks + 1) if ranks % size == 0]


NOT_ON_ALL_NODES = {"recursive-doubling", "halving-doubling", "binomial-tree", "double-tree"}
"""They have no closed form on nodes whose numbers of ranks do not suit them."""


@pytest.mark.parametrize("name", registry.names())
def test_the_closed_form_is_the_simulation_on_all_nodes_of_up_to_64_ranks(name):
    for ranks in range(1, 65):
        for size in divisors(ranks):
            has_form = check_form(name, (size,) * (ranks // size), ODD, multiple=1)
            assert has_form or (name in NOT_ON_ALL_NODES and 1 < size < ranks), (ranks, size)


@pytest.mark.parametrize("name", registry.names())
@settings(max_examples=50, deadline=None)
@given(
    ranks=st.integers(2, 64), machine=machines(), kind=st.integers(0, 2), multiple=st.integers(1, 9)
)
def test_the_closed_form_is_the_simulation_on_any_machine(name, ranks, machine, kind, multiple):
    size = {0: 1, 1: ranks}.get(kind) or divisors(ranks)[len(divisors(ranks)) // 2]
    has_form = check_form(name, (size,) * (ranks // size), machine, multiple)
    assert has_form or (name in NOT_ON_ALL_NODES and 1 < size < ranks)


@settings(max_examples=200, deadline=None)
@given(
    hosts=st.integers(1, 8),
    size=st.integers(1, 8),
    servers=st.integers(1, 12),
    name=st.sampled_from(["direct", "central"]),
    machine=machines(),
)
def test_the_closed_form_knows_the_number_of_servers(hosts, size, servers, name, machine):
    ranks = hosts * size
    servers = min(servers, ranks if name == "direct" else max(ranks // 2, 1))
    has_form = check_form(f"{name}:servers={servers}", (size,) * hosts, machine)
    on_two_nodes = size < servers < ranks and hosts > 1 and size > 1
    assert has_form or on_two_nodes


def test_more_servers_than_workers_have_no_closed_form():
    assert registry.parse("central:servers=3").closed_form((1,) * 5) is None


@settings(max_examples=40, deadline=None)
@given(machine=machines())
@example(ODD)
def test_two_levels_on_nodes_of_one_size_have_a_closed_form(machine):
    for ranks in (4, 6, 12, 30, 64):
        for size in divisors(ranks):
            assert check_form("two-level", (size,) * (ranks // size), machine)


@pytest.mark.parametrize("outer", FULL)
@pytest.mark.parametrize("inner", WITH_HALVES)
@settings(max_examples=8, deadline=None)
@given(hosts=st.integers(1, 6), size=st.integers(1, 6), machine=machines())
def test_any_two_levels_have_a_closed_form(inner, outer, hosts, size, machine):
    text = f"two-level:inner={inner},outer={outer}"
    assert check_form(text, (size,) * hosts, machine)


def test_nodes_that_differ_have_no_closed_form():
    assert registry.parse("two-level").closed_form((2, 3)) is None
    assert registry.parse("ring").closed_form((2, 3)) is None


def test_segments_have_no_closed_form():
    assert registry.parse("ring:segments=2").closed_form((1, 1)) is None


def test_a_wrong_closed_form_is_found(monkeypatch):
    monkeypatch.setattr(registry, "_algorithms", dict(registry._algorithms))
    ring = registry.find("ring")

    def wrong(nodes, each):
        first, *others = ring.phases(nodes, each)
        return [replace(first, added=first.added / 2), *others]

    registry.register("right", ring.phases)(ring.make)
    registry.register("wrong", wrong)(ring.make)
    for ranks in (2, 5):
        assert check_form("right", (1,) * ranks, ODD)
        with pytest.raises(AssertionError, match="wrong"):
            check_form("wrong", (1,) * ranks, ODD)


def test_a_closed_form_by_hand():
    # Three steps of one message near and two far, on a link that four ranks share.
    phase = Phase(3, Load(1, 0.5), Load(2, 0.25), link=4, added=0.125)
    machine = Machine(Link(1, 2), Link(10, 20), 3, 5)
    assert phase.seconds(16, machine) == 3 * (10 + 4 * 16 * 5 + 2 * 3)
    assert phase.seconds(16, replace(machine, shared=1)) == 3 * (1 + 8 * 2 + 20 + 4 * 20 + 2 * 3)
    form = ClosedForm((phase, Phase(1, near=Load(1, 1)), Phase(0, near=Load(9, 9), added=9)))
    assert form.steps == 4
    assert form.seconds(16, machine) == phase.seconds(16, machine) + 1 + 16 * 2
    assert (form.near, form.far, form.added) == (Load(4, 2.5), Load(6, 0.75), 0.375)


@pytest.mark.parametrize("name", registry.names())
def test_the_sums_of_a_closed_form_are_those_of_a_rank(name):
    """On a flat machine: messages for α, volume for β, added bytes for γ."""
    for ranks in (2, 3, 5, 8, 12):
        schedule = build(name, ranks, (1,) * ranks if name == "two-level" else None)
        form = registry.parse(name).closed_form((1,) * ranks)
        wanted = (form.far.messages, form.far.volume, form.added)
        count = 16 * schedule.chunks
        for (a, b, c), value in zip(((1, 0, 0), (0, 1, 0), (0, 0, 1)), wanted, strict=True):
            price = simulate(schedule, count, flat(a, b, c)).seconds
            assert close(price, value * (1 if a else count))


# ---- the literature -----------------------------------------------------------------------


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
}
POWERS_OF_TWO = {
    # Thakur et al. 2005.
    "recursive-doubling": lambda n, a, b, c: lg(n) * (a + b + c),
    "halving-doubling": lambda n, a, b, c: 2 * lg(n) * a + (n - 1) / n * (2 * b + c),
    # The root of 2^k ranks has one child, all other inner nodes have two.
    "double-tree": lambda n, a, b, c: (2 * lg(n) - 1) * (2 * a + b + c / 2),
}
OTHER_NUMBERS = {
    # With f = ⌊lg n⌋ and p = 2^f; a whole buffer in and out beside what p ranks do.
    "recursive-doubling": lambda n, a, b, c: (
        (math.floor(lg(n)) + 2) * (a + b) + (math.floor(lg(n)) + 1) * c
    ),
    "halving-doubling": lambda n, a, b, c: (
        2 * (math.floor(lg(n)) + 1) * a + (2 - 2.0 ** -math.floor(lg(n))) * (2 * b + c)
    ),
    "double-tree": lambda n, a, b, c: 2 * math.floor(lg(n)) * (2 * a + b + c / 2),
}


def check_formula(name, formula, ranks):
    schedule = build(name, ranks)
    size = 64 * schedule.chunks
    for alpha, beta, gamma in ((1, 0, 0), (0, 1, 0), (0, 0, 1), (2e-6, 3e-10, 5e-11)):
        found = simulate(schedule, size, flat(alpha, beta, gamma)).seconds
        assert close(found, formula(ranks, alpha, size * beta, size * gamma)), (name, ranks)


@pytest.mark.parametrize("name", LITERATURE)
def test_the_price_is_that_of_the_literature(name):
    for ranks in (2, 3, 4, 5, 7, 8, 12, 16, 31, 32, 33, 64):
        check_formula(name, LITERATURE[name], ranks)


@pytest.mark.parametrize("name", POWERS_OF_TWO)
def test_the_price_on_powers_of_two_is_that_of_the_literature(name):
    for bits in range(1, 7):
        check_formula(name, POWERS_OF_TWO[name], 2**bits)
    for ranks in (3, 5, 6, 7, 9, 12, 31, 33, 63):
        check_formula(name, OTHER_NUMBERS[name], ranks)


def test_every_algorithm_is_compared_to_a_formula():
    assert {*LITERATURE, *POWERS_OF_TWO, "two-level"} == set(registry.names())


@pytest.mark.parametrize(("hosts", "size"), [(2, 2), (2, 8), (3, 5), (8, 4), (16, 2)])
def test_the_price_of_two_levels_is_the_one_that_is_documented(hosts, size):
    # Direct inside and ring between, over links that ranks share without any gain.
    schedule, nodes = build("two-level", hosts * size, (size,) * hosts), (size,) * hosts
    bytes_ = 8 * schedule.chunks
    machine = Machine(Link(3, 2), Link(7, 5), 0.25)
    inside = 2 * (size - 1) * 3 + (size - 1) / size * bytes_ * (2 * 2 + 0.25)
    between = 2 * (hosts - 1) * 7 + 2 * (hosts - 1) / hosts * bytes_ * 5
    between += (hosts - 1) / (hosts * size) * bytes_ * 0.25
    run = simulate(schedule, bytes_, machine, nodes)
    assert close(run.seconds, inside + between) and len(run.steps) == 2 * hosts


BUSIEST = {
    "ring": lambda n: 2 * (n - 1) / n,
    "naive-ring": lambda n: 2,
    "binomial-tree": lambda n: math.ceil(lg(n)),
    "double-tree": lambda n: 2,
    "one-shot": lambda n: n - 1,
    "direct": lambda n: 2 * (n - 1) / n,
    "central": lambda n: n - 1,
    "gather-broadcast": lambda n: n - 1,
}


@pytest.mark.parametrize("name", BUSIEST)
def test_the_busiest_rank_sends_as_much_as_is_documented(name):
    for ranks in (4, 5, 7, 8, 12, 16, 33):
        schedule = build(name, ranks)
        sent = simulate(schedule, 8 * schedule.chunks, flat(1, 1)).sent
        assert close(sent.max() / (8 * schedule.chunks), BUSIEST[name](ranks)), ranks


@pytest.mark.parametrize(
    ("name", "volume"), [("recursive-doubling", 4), ("halving-doubling", 30 / 16)]
)
def test_the_busiest_of_16_ranks_sends_as_much_as_is_documented(name, volume):
    assert simulate(build(name, 16), 64, flat(1, 1)).sent.max() == volume * 64


def test_the_naive_ring_in_many_segments_is_as_good_as_the_ring():
    ranks, segments = 8, 256
    chain = build(f"naive-ring:segments={segments}", ranks)
    price = simulate(chain, segments * ranks, flat(0, 1)).seconds
    ring = simulate(build("ring", ranks), segments * ranks, flat(0, 1)).seconds
    whole = simulate(build("naive-ring", ranks), segments * ranks, flat(0, 1)).seconds
    assert whole == 2 * (ranks - 1) * segments * ranks
    assert ring <= price <= 1.25 * ring


@pytest.mark.parametrize("name", [name for name in FULL if name in WITH_HALVES])
def test_the_halves_of_a_price_add_up(name):
    whole = build(name, 6)
    first, second = halve(whole)
    prices = [simulate(part, 240, ODD).seconds for part in (first, second, whole)]
    assert close(prices[0] + prices[1], prices[2])
    assert prices[0] >= prices[1]


# ---- many ranks ---------------------------------------------------------------------------


@pytest.mark.parametrize("name", registry.names())
def test_1024_ranks_are_simulated(name):
    nodes = (8,) * 128 if name == "two-level" else (1,) * 1024
    choice = registry.parse(name)
    price = choice.price(2**22, ODD, nodes)
    assert price.source == "simulated" and len(price.simulation.steps) == price.form.steps
    if name != "central":
        assert close(price.seconds, price.form.seconds(2**22, ODD))


@pytest.fixture
def no_simulation(monkeypatch):
    def refuse(*_, **__):
        raise AssertionError("it was simulated, or built")

    monkeypatch.setattr(registry, "simulate", refuse)
    monkeypatch.setattr(registry.Choice, "build", refuse)


@pytest.mark.usefixtures("no_simulation")
@pytest.mark.parametrize("name", registry.names())
def test_65536_ranks_are_priced_by_the_closed_form(name):
    price = registry.parse(name).price(2**30, ODD, (1,) * 65536)
    assert (price.source, price.simulation) == ("closed form", None)
    assert price.seconds == price.form.seconds(2**30, ODD) > 0
    formula = {**LITERATURE, **POWERS_OF_TWO, "two-level": LITERATURE["ring"]}[name]
    # One rank on each node: its port and its node's link carry the same, and the port is slower.
    alpha, beta = ODD.between.latency, ODD.between.seconds_per_byte
    assert close(price.seconds, formula(65536, alpha, 2**30 * beta, 2**30 * ODD.addition))


@pytest.mark.usefixtures("no_simulation")
def test_65536_ranks_on_nodes_of_eight_are_priced_on_two_levels():
    price = registry.parse("two-level").price(2**30, ODD, (8,) * 8192)
    assert price.source == "closed form"
    inside = 14 * 3e-6 + 2**30 * 7 / 8 * (2 * 7e-11 + 17e-12)
    # Eight ranks at 13e-10 seconds per byte are quicker than their link at 5e-10.
    between = 2 * 8191 * 11e-6 + 2**30 * 8191 / 8192 * (2 * 5e-10 + 17e-12 / 8)
    assert close(price.seconds, inside + between)


@pytest.mark.usefixtures("no_simulation")
@pytest.mark.parametrize("text", ["double-tree", "ring:segments=2", "direct:servers=9"])
def test_what_has_no_closed_form_is_not_priced_at_65536_ranks(text):
    words = f"{text} has no closed form for 65536 ranks on 8192 nodes, and more than 1024 are not"
    with pytest.raises(ConfigurationError, match=words):
        registry.parse(text).price(2**30, ODD, (8,) * 8192)


def test_the_last_number_of_ranks_that_is_simulated_is_1024():
    choice, machine = registry.parse("binomial-tree"), flat(1, 0)
    assert choice.price(4, machine, (1,) * 1024).source == "simulated"
    assert choice.price(4, machine, (1,) * 1025).source == "closed form"


def test_a_price_rounds_the_buffer_down_to_whole_elements():
    choice = registry.parse("one-shot")
    assert choice.price(11, flat(0, 1), (1, 1)).seconds == 8
    assert choice.price(11, flat(0, 1), (1, 1), item=2).seconds == 10


def test_a_price_beyond_the_simulated_rounds_alike():
    """As the documentation says of the size, whatever the source."""
    price = registry.parse("one-shot").price(11, flat(0, 1), (1,) * 1025)
    assert price.seconds == 1024 * 8


# ---- lower bounds -------------------------------------------------------------------------


@settings(max_examples=250, deadline=None)
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


@settings(max_examples=250, deadline=None)
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


@settings(max_examples=100, deadline=None)
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


def test_some_algorithms_meet_the_lower_bounds():
    nodes = (1,) * 16
    limits = bound(1600, flat(3, 2, 1), nodes)
    assert limits.latency == simulate(build("recursive-doubling", 16), 1600, flat(3, 0)).seconds
    assert limits.bandwidth == simulate(build("ring", 16), 1600, flat(0, 2)).seconds
    assert limits.addition == simulate(build("ring", 16), 1600, flat(0, 0, 1)).seconds


def test_one_rank_alone_has_no_lower_bound():
    assert bound(100, ODD, (1,)).seconds == 0


def test_nothing_has_no_lower_bound():
    """A buffer of no bytes costs nothing, and no bound may say otherwise."""
    assert bound(0, ODD, (1,) * 4).seconds == 0


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
    machine = Machine(Link(0, 0), Link(1, 0))
    price = simulate(schedule, 5, machine, nodes).seconds
    assert price == 1
    assert bound(5, machine, nodes).seconds <= price


@pytest.mark.parametrize(
    ("nodes", "rounds"),
    [((4,) * 5, 1), ((4,) * 6, 2), ((4,) * 25, 2), ((4, 1, 1, 1, 1), 1), ((1,) * 5, 3), ((9,), 0)],
)
def test_a_node_of_four_ranks_knows_five_times_as_many_nodes_after_each_message(nodes, rounds):
    assert bound(1, Machine(Link(0, 0), Link(1, 0)), nodes).latency == rounds


# ---- machines and nodes -------------------------------------------------------------------


@pytest.mark.parametrize("figure", [-1.0, math.inf, math.nan])
@pytest.mark.parametrize("place", range(6))
def test_figures_of_a_machine_must_be_sensible(place, figure):
    a, b, c, d, gamma, shared = [figure if n == place else 1.0 for n in range(6)]
    with pytest.raises(ConfigurationError, match="latencies and seconds per byte must be >= 0"):
        Machine(Link(a, b), Link(c, d), gamma, shared)


@pytest.mark.parametrize("far", [Link(0.5, 1), Link(1, 0.5)])
def test_the_network_cannot_be_quicker_than_a_node(far):
    with pytest.raises(ConfigurationError, match="between nodes cannot be quicker than inside"):
        Machine(Link(1, 1), far)


def test_a_shared_link_cannot_be_slower_than_one_rank():
    with pytest.raises(ConfigurationError, match=r"cannot need 3 s"):
        Machine(Link(1, 1), Link(1, 2), 0, 3)
    assert Machine(Link(1, 1), Link(1, 2)).uplink == 2
    assert Machine(Link(1, 1), Link(1, 2), 0, 0).uplink == 0


@settings(deadline=None)
@given(st.integers(1, 300), st.integers(1, 300))
def test_ranks_are_split_over_nodes_as_evenly_as_they_go(ranks, nodes):
    if nodes > ranks:
        with pytest.raises(ConfigurationError, match=f"{ranks} ranks go on 1 to {ranks} nodes"):
            split(ranks, nodes)
        return
    sizes = split(ranks, nodes)
    assert (len(sizes), sum(sizes)) == (nodes, ranks) and max(sizes) - min(sizes) <= 1


@pytest.mark.parametrize("nodes", [(), (3,), (5,), (2, 0, 2), (5, -1), (2, 3)])
def test_nodes_that_do_not_add_up_are_refused(nodes):
    with pytest.raises(ConfigurationError, match="are not 4 ranks"):
        check_nodes(4, nodes)
    with pytest.raises(ConfigurationError, match="are not 4 ranks"):
        simulate(build("ring", 4), 4, ODD, nodes)


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


def test_two_levels_on_very_large_nodes_have_no_closed_form():
    assert registry.parse("two-level").closed_form((4096,) * 16) is None
    assert registry.parse("two-level").closed_form((256,) * 256) is not None


@pytest.mark.parametrize("count", [-1, -8])
def test_a_buffer_has_no_less_than_nothing(count):
    with pytest.raises(ConfigurationError, match="elements must be >= 0"):
        simulate(registry.parse("ring").build(4), count, flat(1, 1))

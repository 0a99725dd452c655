"""Closed forms: against the simulation, by hand, against the literature, and for many ranks."""

import itertools
import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpiddp.errors import ConfigurationError
from mpiddp.schedules import registry
from mpiddp.schedules.cost import ClosedForm, Load, Machine, MessageCost, Phase, flat, simulate
from prices import FULL, ODD, WITH_HALVES, build, close, machines, pieced_machines


def check_form(text, nodes, machine, multiple=4, item=4):
    """The closed form is the simulation on these nodes; answers False if there is no form."""
    choice = registry.parse(text)
    form = choice.closed_form(nodes)
    if form is None:
        return False
    schedule = build(text, sum(nodes), nodes if choice.algorithm.knows_nodes else None)
    count = multiple * schedule.chunks
    run = simulate(schedule, count, machine, nodes, item=item)
    assert math.isclose(form.seconds(count * item, machine), run.seconds, rel_tol=1e-9)
    assert form.steps == len(run.steps), (text, nodes)
    return True


NOT_ON_ALL_NODES = {
    "recursive-doubling",
    "halving-doubling",
    "binomial-tree",
    "double-tree",
    "bine",
}
"""They have no closed form on nodes whose numbers of ranks do not suit them."""


def may_have_none(name, ranks, size):
    """Whether there need be no closed form on nodes of ``size`` ranks."""
    is_odd = ranks % 2 and ranks > 1
    return (name in NOT_ON_ALL_NODES and 1 < size < ranks) or (name == "swing" and is_odd)


@pytest.mark.parametrize("name", registry.names())
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


SPARE_FORMS = {
    # The latency variant and the butterfly are priced as what they improve on.
    "swing:variant=latency": "recursive-doubling",
    "bine:variant=butterfly": "halving-doubling",
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


@pytest.mark.parametrize(
    "text", [*SPARE_FORMS, "swing", "bine", "pat:aggregation=1", "pat:aggregation=4"]
)
def test_the_closed_forms_of_swaps_know_which_leave_a_node(text):
    for hosts, size in ((2, 4), (3, 2), (4, 8), (6, 3), (3, 5), (2, 16)):
        has_form = check_form(text, (size,) * hosts, ODD)
        assert has_form or (text == "swing" and hosts * size % 2) or text == "bine"


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
    "ring": lambda n: 2 * (n - 1) / n,
    "naive-ring": lambda n: 2,
    "binomial-tree": lambda n: math.ceil(lg(n)),
    "double-tree": lambda n: 2,
    "one-shot": lambda n: n - 1,
    "direct": lambda n: 2 * (n - 1) / n,
    "central": lambda n: n - 1,
    "gather-broadcast": lambda n: n - 1,
    "pat": lambda n: 2 * (n - 1) / n,
    "bine": lambda n: math.ceil(lg(n)),
    "recursive-doubling": lg,
    "halving-doubling": lambda n: 2 * (n - 1) / n,
    "swing": lambda n: 2 * (n - 1) / n,
}


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

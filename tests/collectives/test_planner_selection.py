"""What a call runs: the stated rule, what a user named, and what cannot be."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import oracle
import promises
from mpiddp.collectives import BOTH, MPI, SHARED, TORCH
from mpiddp.collectives.planner import (
    LATENCY_BYTES,
    MOST_PARTS,
    PART_BYTES,
    CallRequest,
    Layout,
    select,
)
from mpiddp.collectives.transport.node_memory import MAILBOX
from mpiddp.errors import ConfigurationError, ScheduleError
from mpiddp.schedules import registry
from mpiddp.schedules.proof import is_order_fixed, prove
from mpiddp.schedules.schedule import Collective
from wrong_algorithms import registered

ALL, SCATTER, GATHER = Collective.ALL_REDUCE, Collective.REDUCE_SCATTER, Collective.ALL_GATHER
REDUCE, BROADCAST = Collective.REDUCE, Collective.BROADCAST
SHORT, LONG = LATENCY_BYTES, LATENCY_BYTES + 1


def make_layout(nodes, transports=None, absent=None, rank=0) -> Layout:
    if transports is None:
        alone = len(set(nodes)) == len(nodes)
        several = len(set(nodes)) > 1
        transports = (MPI, BOTH, TORCH) if several and alone else (BOTH, MPI, TORCH)
        if not several:
            transports = (SHARED, BOTH, MPI, TORCH)
    hosts = tuple(f"host{node}" for node in nodes)
    return Layout(rank, hosts, tuple(nodes), transports, absent or {})


ONE_NODE = make_layout([0, 0, 0, 0])
LONELY = make_layout([0, 1, 2, 3])
SEVERAL = make_layout([0, 1, 0, 1])
ONLY_MPI = make_layout([0, 0, 1, 1], (MPI,))


def choose(call: CallRequest, size: int, layout: Layout, on_gpu: bool = False) -> tuple[str, str]:
    selection = select(call, size, layout, on_gpu=on_gpu)
    return selection.name, selection.transport


TWO_LEVELS = "two-level:inner=direct,outer={}".format
RULE = [
    (ONE_NODE, ALL, 0, "one-shot", SHARED),
    (ONE_NODE, ALL, MAILBOX, "one-shot", SHARED),
    (ONE_NODE, ALL, MAILBOX + 1, "direct", SHARED),
    (LONELY, ALL, SHORT, "recursive-doubling", MPI),
    (LONELY, ALL, LONG, "ring", MPI),
    (SEVERAL, ALL, SHORT, TWO_LEVELS("recursive-doubling"), BOTH),
    (SEVERAL, ALL, LONG, TWO_LEVELS("ring"), BOTH),
    (ONLY_MPI, ALL, SHORT, "recursive-doubling", MPI),
    (ONLY_MPI, ALL, LONG, "ring", MPI),
    *((ONE_NODE, kind, size, "direct", SHARED)
      for kind in (SCATTER, GATHER) for size in (0, SHORT, 1 << 30)),
    *((LONELY, kind, size, "ring", MPI)
      for kind in (SCATTER, GATHER) for size in (0, SHORT, 1 << 30)),
    *((SEVERAL, kind, LONG, "ring", BOTH) for kind in (SCATTER, GATHER)),
    *((*case, transport)
      for kind in (REDUCE, BROADCAST)
      for *case, transport in (
          (ONE_NODE, kind, SHORT, "binomial-tree", SHARED),
          (SEVERAL, kind, SHORT, "binomial-tree", BOTH),
          (ONE_NODE, kind, LONG, "gather-broadcast", SHARED),
          (LONELY, kind, PART_BYTES, "naive-ring", MPI),
          (LONELY, kind, PART_BYTES + 1, "naive-ring:segments=2", MPI),
          (LONELY, kind, 10 * PART_BYTES, "naive-ring:segments=10", MPI),
          (LONELY, kind, 1 << 40, f"naive-ring:segments={MOST_PARTS}", MPI),
      )),
]  # fmt: skip


@pytest.mark.parametrize(("layout", "kind", "size", "name", "transport"), RULE)
def test_an_all_reduce_follows_the_rule(layout, kind, size, name, transport):
    """And every other collective."""
    assert SHORT == 32 << 10, "as documented"
    assert choose(CallRequest(kind, root=2), size, layout) == (name, transport)


@pytest.mark.parametrize("layout", [ONE_NODE, LONELY, SEVERAL, ONLY_MPI])
def test_wishes_change_the_rule(layout):
    call = CallRequest(ALL, fixed_order=True)
    assert [choose(call, size, layout)[0] for size in (SHORT, LONG)] == ["one-shot", "direct"]
    # Messages that were asked for are messages inside nodes, too.
    call = CallRequest(ALL, transport=MPI)
    assert choose(call, SHORT, layout) == ("recursive-doubling", MPI)
    assert choose(call, LONG, layout) == ("ring", MPI)


@pytest.mark.parametrize(
    ("layout", "size", "name"),
    [
        (ONE_NODE, SHORT, "direct"),
        (ONE_NODE, LONG, "direct"),
        (SEVERAL, SHORT, TWO_LEVELS("recursive-doubling")),
        (SEVERAL, LONG, TWO_LEVELS("ring")),
    ],
)
def test_on_gpus_torch_carries_direct_inside_nodes_and_two_levels_between_them(layout, size, name):
    for wish in ("auto", TORCH):
        found = choose(CallRequest(ALL, transport=wish), size, layout, on_gpu=True)
        assert found == (name if wish == "auto" else found[0], TORCH)


@pytest.mark.parametrize("kind", list(Collective), ids=lambda kind: kind.value)
@pytest.mark.parametrize("layout", [ONE_NODE, LONELY, SEVERAL, ONLY_MPI])
@pytest.mark.parametrize("size", [SHORT, LONG, 10 * PART_BYTES])
def test_what_is_chosen_for_a_fixed_order_has_one(kind, layout, size):
    schedule = select(CallRequest(kind, fixed_order=True), size, layout, on_gpu=False).schedule
    assert kind in (GATHER, BROADCAST) or is_order_fixed(schedule)


@pytest.mark.parametrize("nodes", [[0], [0, 0, 0], [0, 1, 0], [1, 0, 2, 0, 1, 1]])
def test_whatever_is_built_is_proved_and_keeps_its_promise(nodes):
    layout, size = make_layout(nodes), len(nodes)
    kinds, names = set(), [name + end for name in registry.names() for end in ("", ":segments=2")]
    for kind, name, root in itertools.product(Collective, names, {0, size - 1}):
        call = CallRequest(kind, name, root=root, allows_servers=True)
        try:
            selection = select(call, 0, layout, on_gpu=False)
        except ConfigurationError:
            continue
        schedule = selection.schedule
        assert selection.name == call.algorithm
        is_flat = len(layout.sizes) == 1 or not call.algorithm.startswith("two-level")
        if call.kind is ALL and is_flat:
            assert schedule == promises.build(call.algorithm, size)
        kinds.add(call.kind)
        assert schedule.collective is call.kind or size == 1
        prove(schedule)
        oracle.check(schedule, 3 * schedule.chunks + 1, seed=size)
        if call.kind in (REDUCE, BROADCAST):
            assert set(schedule.owners) == {call.root}
        if call.kind in (SCATTER, GATHER):
            # Each rank has the part that the public calls promise it.
            assert schedule.owners == tuple(range(size))
    assert kinds == set(Collective)


@settings(max_examples=30)
@given(st.lists(st.integers(0, 3), min_size=1, max_size=8), st.integers(0, 99))
def test_ranks_may_be_placed_on_nodes_in_any_order(nodes, seed):
    layout = make_layout(nodes)
    order = layout.order
    assert sorted(order) == list(range(len(nodes)))
    placed = [nodes[rank] for rank in order]
    assert placed == sorted(nodes) and sum(layout.sizes) == len(nodes)
    assert layout.sizes == tuple(nodes.count(node) for node in sorted(set(nodes)))
    assert layout.neighbours == tuple(r for r, node in enumerate(nodes) if node == nodes[0])
    schedule = select(CallRequest(ALL, "two-level"), 0, layout, on_gpu=False).schedule
    prove(schedule)
    oracle.check(schedule, 2 * schedule.chunks + 1, seed)


@pytest.mark.parametrize("nodes", [[0, 1, 0, 1], [2, 0, 1, 1, 0, 2], [0, 1, 1, 0, 0]])
@pytest.mark.parametrize("inner", ["direct", "ring", "halving-doubling"])
def test_only_the_middle_of_two_levels_leaves_a_node(nodes, inner):
    layout = make_layout(nodes)
    call = CallRequest(ALL, f"two-level:inner={inner},outer=ring")
    steps = select(call, 0, layout, on_gpu=False).schedule.steps
    crossing = [any(nodes[t.src] != nodes[t.dst] for t in step) for step in steps]
    first, last = crossing.index(True), len(crossing) - 1 - crossing[::-1].index(True)
    assert all(crossing[first : last + 1])
    assert last - first + 1 == 2 * (len(set(nodes)) - 1)
    for step in steps[first : last + 1]:
        assert all(nodes[t.src] != nodes[t.dst] for t in step)


def refuse(call: CallRequest, layout: Layout = ONE_NODE, on_gpu: bool = False) -> str:
    with pytest.raises(ConfigurationError) as found:
        select(call, 100, layout, on_gpu=on_gpu)
    text = str(found.value)
    assert "\n" not in text
    return text


ABSENT = make_layout([0, 1], (MPI, TORCH), {SHARED: "the ranks are on 2 nodes"})
REFUSED = [
    (CallRequest(ALL, transport=SHARED), ABSENT, False,
     ("transport shared-memory is not possible here: the ranks are on 2 nodes; possible: mpi, "
     "torch")),
    *((CallRequest(ALL, transport=transport), ONE_NODE, True,
       f"transport {transport} works on CPU memory, but the tensor is on a GPU: use torch")
      for transport in (MPI, SHARED, BOTH)),
    *((CallRequest(kind, name), ONE_NODE, False,
       f"{name} has no halves, so it makes no {kind.value}")
      for kind in (SCATTER, BROADCAST) for name in ("one-shot", "two-level")),
    *((CallRequest(kind, name), ONE_NODE, False,
       (f"{name} on 4 ranks does not give each rank one part of the buffer, in order, so it makes "
        f"no {kind.value}: ring and direct do"))
      for kind, name in ((SCATTER, "binomial-tree"), (GATHER, "double-tree"), (GATHER, "central"),
                         (SCATTER, "direct:servers=2"))),
    *((CallRequest(kind, name), ONE_NODE, False,
       f"{name} has no single root, so it makes no {kind.value}; binomial-tree, for example, does")
      for kind, name in ((REDUCE, "ring"), (BROADCAST, "halving-doubling"), (REDUCE, "central"))),
]  # fmt: skip


@pytest.mark.parametrize(("call", "layout", "on_gpu", "words"), REFUSED)
def test_what_cannot_be_is_refused_in_one_line(call, layout, on_gpu, words):
    assert refuse(call, layout, on_gpu) == words


@pytest.mark.parametrize("name", ["central", "central:servers=2"])
def test_an_algorithm_whose_servers_contribute_nothing_is_refused(name):
    servers = name[-1:] if "=" in name else "1"
    assert refuse(CallRequest(ALL, name)) == (
        f"{name} leaves out the buffers of {servers} of 4 ranks, which only serve: use "
        "gather-broadcast or direct, which include them"
    )


@pytest.mark.parametrize("layout", [ONE_NODE, SEVERAL])
def test_an_order_that_is_not_fixed_is_refused_with_algorithms_that_have_one(layout):
    text = refuse(CallRequest(ALL, "ring", fixed_order=True), layout)
    begin = "ring adds in an order that depends on where a buffer is cut: with fixed_order use "
    assert text.startswith(begin)
    offered = text.removeprefix(begin).split(", ")
    assert {"one-shot", "direct", "recursive-doubling", "binomial-tree"} <= set(offered)
    for name in registry.names():
        schedule = None
        try:
            schedule = select(
                CallRequest(ALL, name, fixed_order=True), 0, layout, on_gpu=False
            ).schedule
        except ConfigurationError:
            assert name not in offered
        assert schedule is None or (is_order_fixed(schedule) and name in offered)


def test_a_reduce_scatter_of_fixed_order_is_offered_what_makes_one():
    # Halving keeps the order, and gives each rank its part, for powers of two.
    for nodes, offered in (([0] * 4, "halving-doubling, direct"), ([0] * 3, "direct")):
        text = refuse(CallRequest(SCATTER, "ring", fixed_order=True), make_layout(nodes))
        assert text.endswith(f"with fixed_order use {offered}, swing")


def test_what_is_no_all_reduce_is_refused_and_offered_to_nobody():
    with registered():
        for layout in (ONE_NODE, SEVERAL, LONELY):
            with pytest.raises(ScheduleError, match="double on 4 ranks is no all-reduce: step 1:"):
                select(CallRequest(ALL, "double"), 100, layout, on_gpu=False)
        with pytest.raises(ConfigurationError, match=r"with fixed_order use .*one-shot") as caught:
            select(CallRequest(ALL, "ring", fixed_order=True), 100, ONE_NODE, on_gpu=False)
        assert "double" not in str(caught.value)
        # It adds in the order of the ranks, and has no halves.
        select(CallRequest(ALL, "lopsided", fixed_order=True), 100, ONE_NODE, on_gpu=False)
        with pytest.raises(ScheduleError, match="lopsided on 4 ranks cannot be halved: its first"):
            select(CallRequest(REDUCE, "lopsided"), 100, ONE_NODE, on_gpu=False)

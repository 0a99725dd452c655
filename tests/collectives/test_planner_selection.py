"""What a call runs: the stated rule, what a user named, and what cannot be."""

import itertools

import pytest

import oracle
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


def wish(kind: Collective, **options) -> CallRequest:
    return CallRequest(kind, root=2, **options)


TWO_LEVELS = "two-level:inner=direct,outer={}".format
RULE = [
    (ONE_NODE, wish(ALL), 0, "one-shot", SHARED),
    (ONE_NODE, wish(ALL), MAILBOX, "one-shot", SHARED),
    (ONE_NODE, wish(ALL), MAILBOX + 1, "direct", SHARED),
    *((layout, wish(ALL), size, name, MPI)
      for layout in (LONELY, ONLY_MPI)
      for size, name in ((SHORT, "recursive-doubling"), (LONG, "ring"))),
    (SEVERAL, wish(ALL), SHORT, TWO_LEVELS("recursive-doubling"), BOTH),
    (SEVERAL, wish(ALL), LONG, TWO_LEVELS("ring"), BOTH),
    *((*case, transport)
      for kind in (SCATTER, GATHER)
      for *case, transport in (
          (ONE_NODE, wish(kind), 0, "direct", SHARED),
          (ONE_NODE, wish(kind), 1 << 30, "direct", SHARED),
          (LONELY, wish(kind), 0, "ring", MPI),
          (SEVERAL, wish(kind), LONG, "ring", BOTH),
      )),
    *((*case, transport)
      for kind in (REDUCE, BROADCAST)
      for *case, transport in (
          (ONE_NODE, wish(kind), SHORT, "binomial-tree", SHARED),
          (SEVERAL, wish(kind), SHORT, "binomial-tree", BOTH),
          (ONE_NODE, wish(kind), LONG, "gather-broadcast", SHARED),
          (LONELY, wish(kind), PART_BYTES, "naive-ring", MPI),
          (LONELY, wish(kind), PART_BYTES + 1, "naive-ring:segments=2", MPI),
          (LONELY, wish(kind), 10 * PART_BYTES, "naive-ring:segments=10", MPI),
          (LONELY, wish(kind), 1 << 40, f"naive-ring:segments={MOST_PARTS}", MPI),
      )),
    (SEVERAL, wish(ALL, fixed_order=True), SHORT, "one-shot", BOTH),
    (SEVERAL, wish(ALL, fixed_order=True), LONG, "direct", BOTH),
    # Messages that were asked for are messages inside nodes, too.
    (ONE_NODE, wish(ALL, transport=MPI), SHORT, "recursive-doubling", MPI),
    (SEVERAL, wish(ALL, transport=MPI), LONG, "ring", MPI),
]  # fmt: skip


@pytest.mark.parametrize(("layout", "request_", "size", "name", "transport"), RULE)
def test_a_call_follows_the_rule(layout, request_, size, name, transport):
    assert SHORT == 32 << 10, "as documented"
    found = select(request_, size, layout, on_gpu=False)
    assert (found.name, found.transport) == (name, transport)


@pytest.mark.parametrize(
    ("layout", "size", "name"), [(ONE_NODE, SHORT, "direct"), (SEVERAL, LONG, TWO_LEVELS("ring"))]
)
def test_on_gpus_torch_carries_direct_inside_nodes_and_two_levels_between_them(layout, size, name):
    found = select(CallRequest(ALL), size, layout, on_gpu=True)
    assert (found.name, found.transport) == (name, TORCH)
    assert select(CallRequest(ALL, transport=TORCH), size, layout, on_gpu=True).transport == TORCH


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


@pytest.mark.parametrize("nodes", [[0, 1, 0, 1], [2, 0, 1, 1, 0, 2], [1, 0, 0, 1, 1]])
@pytest.mark.parametrize("inner", ["direct", "ring"])
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


ABSENT = make_layout([0, 1], (MPI, TORCH), {SHARED: "the ranks are on 2 nodes"})
REFUSED = [
    (CallRequest(ALL, transport=SHARED), ABSENT, False,
     ("transport shared-memory is not possible here: the ranks are on 2 nodes; possible: mpi, "
     "torch")),
    (CallRequest(ALL, transport=BOTH), ONE_NODE, True,
     f"transport {BOTH} works on CPU memory, but the tensor is on a GPU: use torch"),
    *((CallRequest(kind, name), ONE_NODE, False,
       f"{name} has no halves, so it makes no {kind.value}")
      for kind, name in ((SCATTER, "one-shot"), (BROADCAST, "two-level"))),
    *((CallRequest(kind, name), ONE_NODE, False,
       (f"{name} on 4 ranks does not give each rank one part of the buffer, in order, so it makes "
        f"no {kind.value}: ring and direct do"))
      for kind, name in ((SCATTER, "binomial-tree"), (GATHER, "double-tree"),
                         (SCATTER, "direct:servers=2"))),
    *((CallRequest(kind, name), ONE_NODE, False,
       f"{name} has no single root, so it makes no {kind.value}; binomial-tree, for example, does")
      for kind, name in ((BROADCAST, "halving-doubling"), (REDUCE, "central"))),
    (CallRequest(ALL, "central:servers=2"), ONE_NODE, False,
     ("central:servers=2 leaves out the buffers of 2 of 4 ranks, which only serve: use "
      "gather-broadcast or direct, which include them")),
]  # fmt: skip


@pytest.mark.parametrize(("call", "layout", "on_gpu", "words"), REFUSED)
def test_what_cannot_be_is_refused_in_one_line(call, layout, on_gpu, words):
    with pytest.raises(ConfigurationError) as found:
        select(call, 100, layout, on_gpu=on_gpu)
    assert str(found.value) == words


@pytest.mark.parametrize("kind", [ALL, SCATTER])
@pytest.mark.parametrize("nodes", [[0] * 4, [0] * 3, [0, 1, 0, 1]], ids=str)
def test_an_order_that_is_not_fixed_is_refused_with_algorithms_that_have_one(kind, nodes):
    """What is no all-reduce is offered to nobody."""
    layout = make_layout(nodes)
    with registered():
        with pytest.raises(ConfigurationError) as caught:
            select(CallRequest(kind, "ring", fixed_order=True), 100, layout, on_gpu=False)
        begin = "ring adds in an order that depends on where a buffer is cut: with fixed_order use "
        text = str(caught.value)
        assert text.startswith(begin)
        offered = text.removeprefix(begin).split(", ")
        assert "direct" in offered and ("one-shot" in offered) == (kind is ALL)
        for name in registry.names():
            request = CallRequest(kind, name, fixed_order=True)
            try:
                found = select(request, 100, layout, on_gpu=False)
            except (ConfigurationError, ScheduleError):
                assert name not in offered
            else:
                assert name in offered and is_order_fixed(found.schedule)

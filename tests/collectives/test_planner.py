"""Whole calls by ranks that are threads: chosen, compiled, bound to whichever memory the buffers
lie in, and made many times with buffers that come and go."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import promises
from crews import Crew
from mpiddp.collectives import MPI, SHARED
from mpiddp.collectives.planner import CallRequest, select
from mpiddp.collectives.transport.operators import TYPES, Operator
from mpiddp.errors import ConfigurationError, PeerLostError
from mpiddp.schedules import registry
from mpiddp.schedules.schedule import Collective

LAYOUTS = ([0, 0, 0], [0, 1, 0, 1, 0], [0, 0, 1], [0, 1, 2])
"""The node of each rank; not in the order of the ranks, and not of equal size."""


def draw_numbers(rank: int, turn: int, count: int, dtype: torch.dtype) -> torch.Tensor:
    """Whole numbers that every rank can draw for every other."""
    generator = torch.Generator().manual_seed(1000 * turn + rank)
    return torch.randint(-8, 9, (count,), generator=generator).to(dtype)


def check_result(call: CallRequest, operator, communicator, tensor, before) -> None:
    """AssertionError unless this rank has what the call promises it."""
    rank, size, count = communicator.layout.rank, len(before), tensor.numel()
    part = slice(count * rank // size, count * (rank + 1) // size)
    match call.kind:
        case Collective.ALL_REDUCE:
            assert torch.equal(tensor, promises.combine(before, operator))
        case Collective.REDUCE_SCATTER:
            assert torch.equal(tensor[part], promises.combine(before, operator)[part])
            assert torch.equal(communicator.own_part(tensor), tensor[part])
        case Collective.REDUCE:
            if rank == call.root:
                assert torch.equal(tensor, promises.combine(before, operator))
        case Collective.BROADCAST:
            assert torch.equal(tensor, before[call.root])
        case Collective.ALL_GATHER:
            for other, value in enumerate(before):
                piece = slice(count * other // size, count * (other + 1) // size)
                assert torch.equal(tensor[piece], value[piece])


def make_buffer(communicator, kind: str, count: int, dtype: torch.dtype) -> torch.Tensor:
    if kind == "shared":
        return communicator.shared_memory.empty((count,), dtype)
    return torch.empty(count, dtype=dtype)


@pytest.mark.parametrize("nodes", LAYOUTS, ids=str)
@pytest.mark.parametrize("kind", list(Collective), ids=lambda kind: kind.value)
@settings(max_examples=8, phases=promises.PHASES)
@given(data=st.data())
def test_any_call_keeps_its_promise_on_any_layout(nodes, kind, data):
    longest = data.draw(st.sampled_from([16, 4096, 1 << 30]), "longest message")
    crew = Crew(
        nodes,
        can_copy=data.draw(st.booleans(), "can copy"),
        longest=longest,
        flows=data.draw(st.booleans(), "flows"),
    )
    counts = [0, 1, 3, 100] if longest < 4096 else [0, 1, 100, 20_000]
    possible = crew.communicators[0].layout.transports
    transport = data.draw(st.sampled_from(["auto", *possible]), "transport")
    name, requests = data.draw(st.sampled_from(["auto", *registry.names()]), "algorithm"), []
    try:
        select(CallRequest(kind, name), 0, crew.communicators[0].layout, on_gpu=False)
    except ConfigurationError:
        name = "auto"
    for _ in range(3):
        operator = data.draw(st.sampled_from([Operator.SUM, Operator.MIN, Operator.MAX]))
        is_moved = kind in (Collective.BROADCAST, Collective.ALL_GATHER)
        types = (*TYPES, torch.uint8, torch.bool, torch.complex64) if is_moved else TYPES
        dtype = data.draw(st.sampled_from(types), "type")
        root = data.draw(st.integers(0, len(nodes) - 1), "root")
        wish = torch.float64 if dtype is torch.float32 and data.draw(st.booleans()) else None
        request = CallRequest(kind, name, transport, root, False, operator.value, wish)
        count = data.draw(st.sampled_from(counts), "count")
        memory = data.draw(
            st.lists(st.sampled_from(["private", "shared"]), min_size=len(nodes),
                     max_size=len(nodes))
        )  # fmt: skip
        requests.append((request, operator, dtype, count, memory))

    def part(rank, communicator):
        for turn, (request, operator, dtype, count, memory) in enumerate(requests * 2):
            before = [draw_numbers(each, turn, count, dtype) for each in range(len(nodes))]
            tensor = make_buffer(communicator, memory[rank], count, dtype)
            tensor.copy_(before[rank])
            assert communicator.run(request, tensor) is tensor
            check_result(request, operator, communicator, tensor, before)

    crew.run(part)


@pytest.mark.parametrize("name", ["ring", "two-level"])
@pytest.mark.parametrize("nodes", [[0, 0, 0], [0, 1, 0]], ids=str)
@pytest.mark.parametrize("can_copy", [True, False])
@pytest.mark.parametrize(
    ("great", "dtype", "wish"),
    [(2**8, torch.bfloat16, None), (2**24, torch.float32, torch.float64)],
    ids=["by default", "as asked for"],
)
def test_sums_that_are_made_in_steps_travel_wide(name, nodes, can_copy, great, dtype, wish):
    # Each rank adds less than the last bit: alone it would be lost.
    crew = Crew(nodes, can_copy=can_copy)
    request = CallRequest(Collective.ALL_REDUCE, name, reduction_dtype=wish)

    def part(rank, communicator):
        for count in (5, 5000, 40_000, 7):
            tensor = torch.full((count,), 1 if rank else great, dtype=dtype)
            communicator.run(request, tensor)
            assert tensor.eq(great + 2).all()

    crew.run(part)


def test_calls_of_callbacks_and_of_the_program_are_made_one_after_the_other():
    crew = Crew([0, 0])
    request = CallRequest(Collective.ALL_REDUCE, "direct")

    def part(rank, communicator):
        def chain(_):
            return communicator.run(request, torch.full((20_000,), rank + 1.0))

        for _ in range(30):
            future = communicator.start(request, torch.full((20_000,), 1.0)).then(chain)
            own = communicator.run(request, torch.full((20_000,), 10.0 * (rank + 1)))
            assert own.eq(30).all()
            assert future.wait().eq(3).all()

    crew.run(part)


def test_after_a_call_that_failed_there_are_no_more_and_neighbours_hear_of_it():
    crew = Crew([0, 0], seconds=1.0)
    request = CallRequest(Collective.ALL_REDUCE)

    def part(rank, communicator):
        if rank == 0:
            future = communicator.start(request, torch.ones(4))
            with pytest.raises(PeerLostError, match="waited for rank 1 on host0"):
                future.wait()
            # Whether it was prepared or not: to prepare one may take all ranks.
            for count in (4, 5):
                with pytest.raises(ConfigurationError, match="an earlier collective call failed"):
                    communicator.run(request, torch.ones(count))

    crew.run(part)
    # To the one that comes late the other has said its part of that call, and no more.
    late = torch.ones(4)
    crew.communicators[1].run(request, late)
    assert late.eq(2).all()
    with pytest.raises(PeerLostError, match="whose own call failed"):
        crew.communicators[1].run(request, torch.ones(4))


@pytest.mark.parametrize("way", ["run", "prepare", "start"])
@pytest.mark.parametrize("transport", [SHARED, MPI])
def test_the_tensor_of_a_call_that_failed_is_kept_for_peers_that_are_late(way, transport):
    crew = Crew([0, 0], seconds=0.3)
    request = CallRequest(Collective.ALL_REDUCE, "direct", transport)

    def call(communicator, tensor):
        if way == "prepare":
            communicator.prepare(request, tensor)()
        elif way == "start":
            communicator.start(request, tensor).wait()
        else:
            communicator.run(request, tensor)

    def part(rank, communicator):
        if rank == 0:
            tensor = torch.ones(50)
            kept = weakref.ref(tensor.untyped_storage())
            with pytest.raises(PeerLostError, match="waited for rank 1 on host0"):
                call(communicator, tensor)
            del tensor
            gc.collect()
            assert kept() is not None

    crew.run(part)


@pytest.mark.parametrize("dtype", TYPES)
def test_a_prepared_call_keeps_its_memory_where_it_is(dtype):
    crew = Crew([0, 0])
    request = CallRequest(Collective.ALL_REDUCE)

    def part(rank, communicator):
        tensor = torch.ones(3, dtype=dtype)
        call, view = communicator.prepare(request, tensor), tensor[:]
        # Refused as it is, torch believes afterwards that it has been done: so look at the view.
        with pytest.raises(RuntimeError, match="not resizable"):
            tensor.resize_(10**6)
        call()
        assert view.eq(2).all()
        # The name has other memory now, and what was prepared has the old one.
        tensor.data = torch.zeros(3, dtype=dtype)
        del view
        gc.collect()
        call()
        assert tensor.eq(0).all()

    crew.run(part)

"""Whole calls by ranks that are threads: chosen, compiled, bound to whichever memory the buffers
lie in. And calls on GPUs without any: on streams that only write down what is queued."""

import contextlib
import gc
import sys
import threading
import weakref
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

import launchers
import promises
from crews import Crew
from mpiddp.collectives import MPI, SHARED, communicator
from mpiddp.collectives.executor import MOST_MAILBOX_CALLS
from mpiddp.collectives.planner import CallRequest, select
from mpiddp.collectives.transport import mpi
from mpiddp.collectives.transport.operators import TYPES, Operator
from mpiddp.collectives.transport.waiting import Policy, Waiter
from mpiddp.errors import ConfigurationError, PeerLostError
from mpiddp.schedules import registry
from mpiddp.schedules.schedule import Collective
from mpiddp.torch_internals import bind_comparison

LAYOUTS = ([0, 0, 0], [0, 1, 0, 1, 0], [0, 0, 1], [0, 1, 2])
"""The node of each rank; not in the order of the ranks, and not of equal size."""


def draw_numbers(rank: int, turn: int, count: int, dtype: torch.dtype) -> torch.Tensor:
    """Whole numbers that every rank can draw for every other."""
    generator = torch.Generator().manual_seed(1000 * turn + rank)
    return torch.randint(-8, 9, (count,), generator=generator).to(dtype)


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
        nodes, can_copy=data.draw(st.booleans(), "can copy"), longest=longest,
        flows=data.draw(st.booleans(), "flows"),
    )  # fmt: skip
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
        found = []
        for turn, (request, _, dtype, count, memory) in enumerate(requests * 2):
            tensor = make_buffer(communicator, memory[rank], count, dtype)
            tensor.copy_(draw_numbers(rank, turn, count, dtype))
            assert communicator.run(request, tensor) is tensor
            found.append(tensor.clone())
        return found

    layout, found = crew.communicators[0].layout, zip(*crew.run(part), strict=True)
    for turn, (after, row) in enumerate(zip(found, requests * 2, strict=True)):
        request, operator, dtype, count, _ = row
        before = [draw_numbers(rank, turn, count, dtype) for rank in range(len(nodes))]
        made = select(request, count * dtype.itemsize, layout, on_gpu=False)
        promises.check(made.schedule, before, after, operator)


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


@pytest.mark.parametrize("can_copy", [True, False])
def test_buffers_and_lengths_beyond_what_is_remembered_are_made_anew(can_copy):
    crew = Crew([0, 0], can_copy=can_copy)
    request = CallRequest(Collective.ALL_REDUCE)
    # And longer than a stage that neighbours know.
    counts = (*range(1, communicator.MOST_PLANS + 5), *range(1, 5), 20_000, 90_000, 20_000)

    def part(rank, calls):
        buffers = [torch.zeros(4) for _ in range(MOST_MAILBOX_CALLS + 3)]
        for tensor in (*buffers, *buffers, *map(torch.zeros, counts)):
            tensor.fill_(rank + 1)
            calls.run(request, tensor)
            assert tensor.eq(3).all()
        assert len(calls._plans) == communicator.MOST_PLANS

    crew.run(part)


def test_calls_of_callbacks_and_of_the_program_are_made_one_after_the_other():
    crew = Crew([0, 0])
    request = CallRequest(Collective.ALL_REDUCE, "direct")

    def part(rank, communicator):
        def chain(_):
            tensor = communicator.run(request, torch.full((20_000,), rank + 1.0))
            made = communicator.start(request, tensor)
            # If the future was done by then, the program's own thread runs this.
            return made.value() if communicator._is_worker() else made.wait()

        for _ in range(30):
            future = communicator.start(request, torch.full((20_000,), 1.0)).then(chain)
            own = communicator.run(request, torch.full((20_000,), 10.0 * (rank + 1)))
            assert own.eq(30).all()
            assert future.wait().eq(6).all()
        launchers.until(lambda: not communicator._needs_checks(own), "calls to be quick again")

    crew.run(part)


def test_after_a_call_that_failed_there_are_no_more_and_neighbours_hear_of_it():
    crew = Crew([0, 0], seconds=1.0)
    request = CallRequest(Collective.ALL_REDUCE)

    def part(rank, communicator):
        if rank == 0:
            with pytest.raises(PeerLostError):
                communicator.run(request, torch.ones(4))
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

    def part(rank, communicator):
        make = getattr(communicator, way)
        calls = {"prepare": lambda *of: make(*of)(), "start": lambda *of: make(*of).wait()}
        if rank == 0:
            tensor = torch.ones(50)
            kept = weakref.ref(tensor.untyped_storage())
            with pytest.raises(PeerLostError, match=r"in step 1 of 2: waited for rank 1 on host0"):
                calls.get(way, make)(request, tensor)
            with pytest.raises(ConfigurationError, match="an earlier collective call failed"):
                calls.get(way, make)(request, tensor)
            del tensor
            gc.collect()
            assert kept() is not None

    crew.run(part)


def test_a_prepared_call_keeps_its_memory_where_it_is():
    crew = Crew([0, 0])
    request = CallRequest(Collective.ALL_REDUCE)

    def part(rank, communicator):
        tensor = torch.ones(3)
        call, view = communicator.prepare(request, tensor), tensor[:]
        # Refused as it is, torch believes afterwards that it has been done: so look at the view.
        with pytest.raises(RuntimeError, match="not resizable"):
            tensor.resize_(10**6)
        call()
        assert view.eq(2).all()
        # The name has other memory now, and what was prepared has the old one.
        tensor.data = torch.zeros(3)
        del view
        gc.collect()
        call()
        assert tensor.eq(0).all()

    crew.run(part)


GPU = torch.device("cuda", 0)


class Stream:
    """Work is queued behind all that was queued before, and behind what was waited for."""

    def __init__(self, device=GPU):
        assert device == GPU
        self.queued = set()

    def wait_stream(self, other):
        self.queued |= other.queued


class Machine:
    """A GPU's streams, one of them the current one; and for each piece of work what it follows."""

    def __init__(self):
        self.main = Stream()
        self.current = [self.main]
        self.follows = {}

    def queue(self, work):
        self.follows[work] = set(self.current[-1].queued)
        self.current[-1].queued.add(work)

    @contextlib.contextmanager
    def on(self, stream):
        self.current.append(stream)
        yield
        self.current.pop()


@pytest.fixture
def machine(monkeypatch):
    found = Machine()

    class Future:
        """Records an event on the current stream, as torch documents it."""

        def __init__(self, devices):
            assert devices == [GPU]

        def set_result(self, result):
            self.result, self.event = result, set(found.current[-1].queued)

        def wait(self):
            found.current[-1].queued |= self.event
            return self.result

    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "stream", found.on)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: found.current[-1])
    monkeypatch.setattr(torch.futures, "Future", Future)
    monkeypatch.setattr(communicator, "_increment_version", lambda tensors: None)
    return found


class Tensor:
    """What a call asks of one, on a GPU."""

    device, dtype, is_cpu, requires_grad = GPU, torch.float32, False, False

    def __init__(self, name):
        self.name = name
        self.streams = []

    def numel(self):
        return 6

    def get_device(self):
        return 0

    def record_stream(self, stream):
        self.streams.append(stream)


@pytest.fixture
def calls(machine, monkeypatch):
    """One rank's calls, which are only queued."""
    found = Crew([0, 0]).communicators[0]

    # It has no `prepare`, which must not be called: a begun call comes first.
    plan = SimpleNamespace(run=lambda tensor: machine.queue(f"sum of {tensor.name}"))
    monkeypatch.setattr(found, "_ensure_plan", lambda key, request, tensor: plan)
    return found


REQUEST = CallRequest(Collective.ALL_REDUCE, "ring")


def test_a_call_that_was_begun_goes_beside_the_current_stream(machine, calls):
    bucket = Tensor("bucket")
    machine.queue("its gradients")
    future = calls.start(REQUEST, bucket)
    machine.queue("other gradients")
    assert future.wait() is bucket
    machine.queue("update")
    assert machine.follows["sum of bucket"] == {"its gradients"}
    assert machine.follows["other gradients"] == {"its gradients"}
    assert machine.follows["update"] >= {"sum of bucket", "other gradients"}
    # The memory is not given to another one while that stream works in it.
    (side,) = bucket.streams
    assert side is not machine.main
    # Begun calls are made in their order, and others after them, on the current stream.
    calls.start(REQUEST, Tensor("b"))
    assert machine.follows["sum of b"] >= {"sum of bucket", "update"}
    calls.run(REQUEST, Tensor("c"))
    assert machine.follows["sum of c"] >= {"sum of b"}
    assert machine.current == [machine.main] and "sum of c" in machine.main.queued


@pytest.mark.parametrize("is_prepared", [False, True], ids=["plain", "prepared"])
def test_calls_of_two_threads_do_not_overlap(is_prepared):
    calls, others = Crew([0, 0], seconds=60).communicators
    tensor = torch.ones(6)
    call = calls.prepare(REQUEST, tensor) if is_prepared else partial(calls.run, REQUEST, tensor)

    def begin():
        # Once a call was refused, the others may go to their end, or not.
        with contextlib.suppress(PeerLostError):
            calls.run(REQUEST, torch.ones(6))

    thread = threading.Thread(target=begin)
    thread.start()
    launchers.until(lambda: not calls._turn, "a call to be under way")
    with pytest.raises(ConfigurationError) as caught:
        call()
    assert str(caught.value) == (
        "rank 0 on host0 began a collective call in thread 'MainThread' while another thread makes "
        "one: make calls one after the other, in the same order on all ranks, or use "
        "async_op=True"
    )
    assert tensor.tolist() == [1] * 6
    with contextlib.suppress(PeerLostError):
        others.run(REQUEST, torch.ones(6))
    thread.join()
    with pytest.raises(ConfigurationError, match="an earlier collective call failed"):
        call()


@pytest.mark.parametrize("is_prepared", [False, True], ids=["plain", "prepared"])
def test_a_call_is_counted_once_wherever_its_thread_is(is_prepared, monkeypatch):
    calls, seen = Crew([0]).communicators[0], []
    tensor = torch.ones(6)

    def look(*_):
        seen.append(calls.count_calls())

    class Turn(list):
        def pop(self):
            look()
            return super().pop()

        def append(self, number):
            look()
            super().append(number)

    plan = SimpleNamespace(run=look, prepare=lambda tensor: look)
    monkeypatch.setattr(calls, "_turn", Turn([0]))
    monkeypatch.setattr(calls, "_ensure_plan", lambda key, request, tensor: plan)
    call = calls.prepare(REQUEST, tensor) if is_prepared else partial(calls.run, REQUEST, tensor)
    call()
    call()
    assert seen == [(0, 0), (1, 0), (1, 1), (1, 1), (2, 1), (2, 2)]


@pytest.mark.parametrize("is_known", [True, False], ids=["torch's", "own"])
def test_a_tensor_is_compared_in_all_that_a_call_asks(is_known, monkeypatch):
    if not is_known:
        monkeypatch.setitem(sys.modules, "torch._C._dynamo.guards", None)
    memory = torch.ones(6)
    makers = [
        memory.detach, lambda: memory[:3], lambda: memory.view(2, 3),
        lambda: memory.view(3, 2).t(), lambda: memory.view(torch.int32),
        lambda: torch.nn.Parameter(memory, requires_grad=False),
        lambda: memory.detach().requires_grad_(), lambda: torch._neg_view(memory),
        lambda: memory.view(torch.complex64), lambda: memory.view(torch.complex64).conj(),
        lambda: memory.to("meta"),
    ]  # fmt: skip
    for number, make in enumerate(makers):
        is_alike = bind_comparison(make())
        assert [is_alike(other()) for other in makers] == [place == number for place in range(11)]


@pytest.mark.parametrize(("limit", "done"), [("", 2), ("MPI_THREAD_FUNNELED", 0)])
def test_another_thread_frees_requests_and_makes_progress_where_it_may(limit, done, monkeypatch):
    found = []
    request = SimpleNamespace(Free=lambda: found.append("freed"))
    communicator = SimpleNamespace(Iprobe=lambda: found.append("probed"))
    monkeypatch.setattr(mpi, "find_thread_limit", lambda: limit)
    monkeypatch.setattr(mpi, "may_call", lambda: not limit)
    kept = [mpi.MpiMessages([request], (), Waiter(Policy.SLEEP, 1.0), str)]

    def work():
        kept.clear()
        mpi.MpiMessenger.progress(SimpleNamespace(_communicator=communicator))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert found == ["freed", "probed"][:done]


@pytest.mark.parametrize("size", [1, 2])
def test_a_tensor_on_another_gpu_is_refused(size):
    calls = Crew([0] * size).communicators[0]
    calls._device = torch.device("cuda", 1)
    with FakeTensorMode():
        tensors = {device: torch.empty(0, device=device) for device in ("cuda:0", "cuda:1", "cpu")}
    said = "expected a tensor on cuda:1, the GPU of this session, found one on cuda:0: move it "
    for make in (calls.run, calls.prepare):
        with pytest.raises(ConfigurationError, match=said) as caught:
            make(REQUEST, tensors["cuda:0"])
        assert "\n" not in str(caught.value)
    for device in ("cuda:1", "cpu"):
        assert communicator.find_problem(tensors[device], calls._device) == ""
    # A session without GPUs has none to compare with.
    assert communicator.find_problem(tensors["cuda:0"], torch.device("cpu")) == ""


class OnGpu(torch.Tensor):
    """Says that it lies on a GPU."""

    device, is_cpu, is_cuda = GPU, False, True

    def get_device(self):
        return 0


def fill_on_gpu(rank, count, dtype):
    return (torch.arange(count) % 7 + rank).to(dtype).as_subclass(OnGpu)


@pytest.mark.parametrize(
    ("nodes", "options"),
    [([0, 0, 0], {}), ([0, 0], {"can_copy": False}), ([0, 1], {}), ([0, 0, 1, 1], {})],
    ids=["one node", "without single copies", "two nodes", "both levels"],
)
def test_without_nccl_the_ranks_of_gpus_meet_in_the_hosts_memory(nodes, options):
    """Lengths up and down again, of two types, and of a rank that computes on its CPU."""
    crew = Crew(nodes, has_nccl=False, **options)
    kinds = ((7, torch.float32), (100_003, torch.bfloat16), (0, torch.int64), (5000, torch.int64))

    def take_part(rank, calls):
        found = []
        for count, dtype in (*kinds, *kinds):
            tensor = fill_on_gpu(rank, count, dtype)
            if rank == 1:
                tensor = tensor.as_subclass(torch.Tensor)
            calls.run(CallRequest(Collective.ALL_REDUCE), tensor)
            root = fill_on_gpu(rank, count, dtype)
            calls.run(CallRequest(Collective.BROADCAST, root=1), root)
            found.append((tensor.as_subclass(torch.Tensor), root.as_subclass(torch.Tensor)))
        return found

    for found in crew.run(take_part):
        for (count, dtype), (total, root) in zip((*kinds, *kinds), found, strict=True):
            filled = [fill_on_gpu(rank, count, dtype) for rank in range(len(nodes))]
            assert torch.equal(total, sum(filled, torch.zeros(count, dtype=dtype)))
            assert torch.equal(root, filled[1])
    # Calls take turns in one copy, which the peers map.
    rooms = [plan.room for plan in crew.communicators[0]._plans.values() if plan.room.numel()]
    assert len({room.data_ptr() for room in rooms}) <= len(kinds) - 1

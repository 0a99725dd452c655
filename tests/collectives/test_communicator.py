"""Calls of several threads; and calls on GPUs without any: on tensors without memory, on streams
that only write down what is queued."""

from __future__ import annotations

import contextlib
import sys
import threading
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import launchers
from crews import Crew
from mpiddp.collectives import communicator
from mpiddp.collectives.planner import CallRequest
from mpiddp.collectives.transport import mpi
from mpiddp.collectives.transport.waiting import Policy, Waiter
from mpiddp.errors import ConfigurationError, PeerLostError
from mpiddp.schedules.schedule import Collective
from mpiddp.torch_internals import bind_comparison

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

    class Plan:
        def run(self, tensor):
            machine.queue(f"sum of {tensor.name}")

        def prepare(self, tensor):
            raise AssertionError("a begun call comes before this one")

    monkeypatch.setattr(found, "_ensure_plan", lambda key, request, tensor: Plan())
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

    class Turn(list):
        def pop(self):
            seen.append(calls.count_calls())
            return super().pop()

        def append(self, number):
            seen.append(calls.count_calls())
            super().append(number)

    class Plan:
        def run(self, tensor):
            seen.append(calls.count_calls())

        def prepare(self, tensor):
            return partial(self.run, tensor)

    monkeypatch.setattr(calls, "_turn", Turn([0]))
    monkeypatch.setattr(calls, "_ensure_plan", lambda key, request, tensor: Plan())
    call = partial(calls.run, REQUEST, tensor)
    if is_prepared:
        call = calls.prepare(REQUEST, tensor)
    call()
    call()
    assert seen == [(0, 0), (1, 0), (1, 1), (1, 1), (2, 1), (2, 2)]


@pytest.mark.parametrize("is_known", [True, False], ids=["torch's", "own"])
def test_a_tensor_is_compared_in_all_that_a_call_asks(is_known, monkeypatch):
    if not is_known:
        monkeypatch.setitem(sys.modules, "torch._C._dynamo.guards", None)
    memory = torch.ones(6)
    makers = [
        memory.detach,
        lambda: memory[:3],
        lambda: memory.view(2, 3),
        lambda: memory.view(3, 2).t(),
        lambda: memory.view(torch.int32),
        lambda: torch.nn.Parameter(memory, requires_grad=False),
        lambda: memory.detach().requires_grad_(),
        lambda: torch._neg_view(memory),
        lambda: memory.view(torch.complex64),
        lambda: memory.view(torch.complex64).conj(),
        lambda: memory.to("meta"),
    ]
    for number, make in enumerate(makers):
        is_alike = bind_comparison(make())
        assert [is_alike(other()) for other in makers] == [place == number for place in range(11)]


@pytest.mark.parametrize(("limit", "freed"), [("", [True]), ("MPI_THREAD_FUNNELED", [])])
def test_requests_that_another_thread_drops_are_freed_where_it_may(limit, freed, monkeypatch):
    found = []
    request = SimpleNamespace(Free=lambda: found.append(True))
    monkeypatch.setattr(mpi, "find_thread_limit", lambda: limit)
    kept = [mpi.MpiMessages([request], (), Waiter(Policy.SLEEP, 1.0), str)]
    thread = threading.Thread(target=kept.clear)
    thread.start()
    thread.join()
    assert found == freed


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
    rooms = {
        plan.room.data_ptr() for plan in crew.communicators[0]._plans.values() if plan.room.numel()
    }
    assert len(rooms) <= len(kinds) - 1

"""Calls on GPUs without any: on tensors without memory, on streams that only write down what is
queued."""

from __future__ import annotations

import contextlib

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from crews import Crew
from mpiddp.collectives import communicator
from mpiddp.collectives.planner import Request
from mpiddp.errors import ConfigurationError
from mpiddp.schedules.schedule import Collective

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
    monkeypatch.setattr(communicator, "tell_autograd", lambda tensor: None)
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

    monkeypatch.setattr(found, "_prepare", lambda key, request, tensor: Plan())
    return found


REQUEST = Request(Collective.ALL_REDUCE, "ring")


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


def test_begun_calls_are_made_in_their_order_and_others_after_them(machine, calls):
    for name in "ab":
        machine.queue(f"gradients {name}")
        calls.start(REQUEST, Tensor(name))
    assert machine.follows["sum of b"] >= {"sum of a", "gradients b"}
    calls.run(REQUEST, Tensor("c"))
    assert machine.follows["sum of c"] >= {"sum of a", "sum of b"}
    assert machine.current == [machine.main]


def test_calls_on_the_current_stream_stay_there(machine, calls):
    machine.queue("gradients")
    calls.run(REQUEST, Tensor("a"))
    assert machine.follows["sum of a"] == {"gradients"}
    machine.queue("update")
    assert "sum of a" in machine.follows["update"]


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
    # A session without GPUs has none to compare with; NCCL's lack is said elsewhere.
    assert communicator.find_problem(tensors["cuda:0"], torch.device("cpu")) == ""

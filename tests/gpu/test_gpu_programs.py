"""The executor on a real GPU: programs over torch tensors, and streams."""

import time

import pytest
import torch

import mpiddp
from crews import Crew, Team
from mpiddp.collectives.planner import CallRequest
from mpiddp.collectives.transport.operators import make_span
from mpiddp.schedules import registry
from mpiddp.schedules.schedule import Collective
from mpiddp.training.options.groups.straggler import Slowdown, Straggler

pytestmark = pytest.mark.gpu


@pytest.fixture
def device():
    if not torch.cuda.device_count():
        pytest.skip("no GPU")
    return torch.device("cuda", 0)


@pytest.mark.parametrize("name", registry.names())
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
def test_programs_run_on_gpu_tensors(device, name, dtype):
    for ranks in (2, 3, 4):
        schedule = registry.find(name).make(ranks)
        buffers = [
            (torch.arange(1000, device=device) % 7 + rank).to(dtype) for rank in range(ranks)
        ]
        total = sum(buffers[rank] for rank in schedule.members)
        Team(schedule, buffers, flows=False).play()
        for rank in schedule.members:
            assert torch.equal(buffers[rank], total)


def test_a_span_sees_the_tensor_and_keeps_it_not_alive(device):
    tensor = torch.arange(1000.0, device=device)
    span = make_span(tensor)
    assert torch.equal(span.operand(10, 20), tensor[10:20])
    span.slice(0, 1).fill_(5)
    assert tensor[0].item() == 5
    before = torch.cuda.memory_allocated(device)
    del tensor
    assert torch.cuda.memory_allocated(device) < before


CYCLES = 1 << 28
"""A GPU counts them in a tenth of a second or more."""


def test_a_call_that_was_begun_lets_the_current_stream_go_on(device, monkeypatch):
    calls = Crew([0, 0]).communicators[0]

    class Plan:
        """A sum that takes its time."""

        def run(self, tensor):
            torch.cuda._sleep(CYCLES)
            tensor.add_(tensor)

    monkeypatch.setattr(calls, "_ensure_plan", lambda key, request, tensor: Plan())
    request = CallRequest(Collective.ALL_REDUCE, "ring")
    buckets = [torch.empty(1 << 20, device=device) for _ in range(3)]
    torch.cuda.synchronize(device)
    futures = []
    for number, bucket in enumerate(buckets):
        # What is queued before the call is in its sum.
        torch.cuda._sleep(CYCLES >> 4)
        bucket.fill_(number)
        futures.append(calls.start(request, bucket))
    gone = torch.cuda.Event()
    gone.record()
    gone.synchronize()
    done = torch.cuda.Event()
    calls._stream.record_event(done)
    assert not done.query(), "the current stream waited for the calls"
    results = [future.wait().clone() for future in futures]
    for number, result in enumerate(results):
        assert torch.equal(result, torch.full_like(result, 2.0 * number))


@pytest.mark.parametrize("wait", [False, True])
@pytest.mark.parametrize("number", [0, 1])
def test_a_save_waits_for_each_stream_of_a_gpu_that_is_not_current(number, wait, device, tmp_path):
    """The weights change on a side stream, of a GPU that the script has not made current."""
    if number >= torch.cuda.device_count():
        pytest.skip("one GPU")
    model = torch.nn.Linear(1000, 1000, device=torch.device("cuda", number))
    stream = torch.cuda.Stream(model.weight.device)
    torch.cuda.synchronize(model.weight.device)
    assert torch.cuda.current_device() == device.index
    with mpiddp.Checkpointer(tmp_path, model) as checkpointer:
        with torch.cuda.stream(stream), torch.no_grad():
            torch.cuda._sleep(CYCLES)
            model.weight.fill_(3)
        checkpointer.save(1, wait=wait)
        checkpointer.wait()
        with torch.no_grad():
            model.weight.zero_()
        checkpointer.restore()
    assert (model.weight == 3).all()


def test_a_straggler_sleeps_once_its_gpu_has_nothing_to_do(device, monkeypatch):
    slow = Slowdown(Straggler(0, 2), 0, (0,), 0, 0.0, device)
    torch.cuda.synchronize(device)
    torch.cuda._sleep(CYCLES)
    done = torch.cuda.Event()
    done.record()
    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    slow.wait(0)
    assert done.query()

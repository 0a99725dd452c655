"""The executor on a real GPU: programs over torch tensors, and the public calls over NCCL."""

from __future__ import annotations

import pytest
import torch

import launchers
from mpiddp.collectives import registry
from mpiddp.collectives.operators import make_span
from threads import Team

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
    assert torch.equal(span.compute(10, 20), tensor[10:20])
    span.move(0, 1).fill_(5)
    assert tensor[0].item() == 5
    before = torch.cuda.memory_allocated(device)
    del tensor
    assert torch.cuda.memory_allocated(device) < before


PROGRAM = """
import torch, mpiddp
with mpiddp.init(timeout=60) as session:
    size, rank = session.world.size, session.world.rank
    names = ("auto", "ring", "direct", "recursive-doubling", "two-level", "ring:segments=3")
    for algorithm in names:
        for dtype in (torch.float32, torch.bfloat16):
            for count in (0, 1, 7, 100_003):
                tensor = (torch.arange(count, device=session.device) % 5 + rank).to(dtype)
                wanted = torch.arange(count, device=session.device) % 5 * size
                mpiddp.all_reduce(tensor, algorithm)
                assert torch.equal(tensor, (wanted + size * (size - 1) // 2).to(dtype)), algorithm
    future = mpiddp.all_reduce_async(torch.ones(10, device=session.device))
    assert future.wait().tolist() == [size] * 10
    try:
        mpiddp.all_reduce(torch.ones(3, device=session.device), transport="mpi")
    except mpiddp.ConfigurationError as error:
        assert "GPU" in str(error)
    else:
        raise AssertionError("MPI took a GPU's memory")
"""


def test_calls_over_nccl(device):
    """With as many ranks as there are GPUs; one rank alone has nothing to send."""
    ranks = min(4, torch.cuda.device_count())
    launcher = launchers.table()["openmpi" if ranks > 1 else "alone"]
    launchers.run(launcher, ranks, ["-c", PROGRAM], timeout=150).expect(0)

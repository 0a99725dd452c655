"""Which real GPU belongs to a rank, and who may share it."""

import re
import socket

import pytest
import torch

import launchers
from doctors import examine
from mpiddp.doctor.gpu import gpus

pytestmark = pytest.mark.gpu

IDENTITY = """
import torch
from mpiddp.launch.device import device
from mpiddp.launch.mpi.world import solitary_world
placement = device.find_placement(
    solitary_world(), "auto", may_initialize=False, allow_sharing=False
)
assert device.find_identity(torch.cuda.device_count()) is None
assert not torch.cuda.is_initialized()
selected = device.select(placement)
properties = torch.cuda.get_device_properties(0)
assert placement.identity.removeprefix("GPU-") == str(properties.uuid), placement
assert str(properties.uuid) in selected.identity, selected
assert selected.card == device.find_bus(properties) is not None, selected
assert torch.cuda.current_device() == placement.index == 0
"""


def test_the_identity_is_torchs_and_asking_makes_no_context(gpu):
    launchers.run("alone", 1, ["-c", IDENTITY], env=gpu).expect(0)


FORK = """
import os, torch, mpiddp
from mpiddp.launch.failure.failure import FailureHandler
from mpiddp.launch.options import Options
from mpiddp.launch.startup import start
with start(Options(timeout=60), FailureHandler(), makes_group=False) as session:
    child = os.fork()
    if child == 0:
        os._exit(0 if torch.ones(1, device="cuda").item() == 1 else 1)
    assert os.waitpid(child, 0)[1] == 0
"""


def test_a_script_may_fork_and_use_cuda_in_the_child(gpu):
    launchers.run("alone", 1, ["-W", "ignore", "-c", FORK], env=gpu).expect(0)


ON_GPU = """
import torch, mpiddp
with mpiddp.init(timeout=60) as session:
    ones = torch.ones(4, device=session.device)
    torch.distributed.all_reduce(ones)
    assert session.backend == "nccl" and session.device.type == "cuda"
    assert torch.cuda.current_device() == session.device.index == 0
    assert ones.tolist() == [1.0] * 4
    has_context = torch._C._cuda_hasPrimaryContext
    assert [index for index in range(torch.cuda.device_count()) if has_context(index)] == [0]
"""


def test_a_session_uses_nccl_and_makes_no_context_on_another_gpu(gpu):
    result = launchers.run("alone", 1, ["-c", ON_GPU]).expect(0)
    assert re.search(r"backend         nccl \d+\.\d+", result.stderr)
    assert "devices         GPU " in result.stderr


def test_two_ranks_share_a_real_gpu_only_when_asked(gpu, launcher_of_several):
    program = (
        "import sys, mpiddp\n"
        "with mpiddp.init(timeout=60, allow_shared_gpu=sys.argv[1] == 'yes') as session:\n"
        "    assert session.backend == 'gloo' and session.device.index == 0\n"
    )
    row = launcher_of_several
    refused = launchers.run(row, 2, ["-c", program, "no"], env=gpu).expect(3)
    assert refused.stderr.count("would use a GPU that another rank uses") == 1
    allowed = launchers.run(row, 2, ["-c", program, "yes"], env=gpu).expect(0)
    assert "ranks 0, 1 use one GPU or slices of one" in allowed.stderr


def test_the_doctor_examines_a_real_gpu(gpu, tmp_path):
    reading = examine("alone", 1, cwd=tmp_path, env=gpu)
    # One rank is too few for a machine that has more, and its name may be unknown.
    expected = {"GPUs": "warn"} if gpus.count_files() > 1 else {}
    try:
        socket.getaddrinfo(socket.gethostname(), None)
    except OSError:
        expected["host name"] = "warn"
    assert reading.bad() == expected
    assert torch.cuda.get_device_name(0) in reading.line("GPUs").text
    assert "NCCL 2." in reading.line("GPU kinds").text
    assert "TFLOP/s" in reading.line("GPU speed").text
    assert "with nccl" in reading.line("all-reduce").text
    assert "NCCL 2." in reading.line("NCCL transport").text

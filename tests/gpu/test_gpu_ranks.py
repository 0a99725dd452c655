"""Several ranks on real GPUs: calls, training, failures, the doctor's transport, benchmarks.

Where it is cheap, the same ranks do the same on CPUs over Gloo, so that what stands here works.
"""

import sys

import pytest
import torch

import battery
import gpu_work
import launchers
from facts import messages
from mpiddp.launch.device.nccl import QUEUE_SECONDS

DEADLINE = 170.0


@pytest.mark.gpu
def test_the_ranks_have_the_backend_and_the_gpus_that_the_others_mean(several, gpu_pool):
    found = gpu_pool.call(gpu_work.find_backend).values
    assert set(found) == {(several.backend, "cuda")}


@pytest.mark.gpu
@pytest.mark.parametrize("part", ["gpu sums", "gpu moves"])
def test_calls(gpu_pool, part):
    battery.check_reports(gpu_pool.call(battery.run, part, timeout=DEADLINE).values)


def test_buffers_on_a_side_stream_are_freed_and_made_again(ranks):
    assert set(ranks.call(gpu_work.reuse_buffers, timeout=DEADLINE).values) == {0}


def test_a_rank_that_comes_late_is_waited_for(ranks):
    values = ranks.call(gpu_work.come_late, 1.0).values
    size = len(values)
    assert values == [[size * size * (size + 1) / 2]] * size


def test_a_training_goes_on_from_its_checkpoint_with_the_same_bits(ranks, tmp_path):
    whole, resumed = zip(*ranks.call(gpu_work.resume, cwd=tmp_path).values, strict=True)
    assert len(set(whole + resumed)) == 1


def test_the_backend_of_mpiddp_beside_the_sessions(ranks):
    for total, said in ranks.call(gpu_work.use_backend).values:
        assert total == len(ranks.call(gpu_work.find_backend).values)
        assert said is None or "works on CPU tensors" in said


AWAY = """
import sys, time, torch, mpiddp
with mpiddp.init(timeout=10, allow_shared_gpu=True) as session:
    assert session.backend == "nccl"
    group = torch.distributed.new_group() if sys.argv[1] == "own group" else None
    tensor = torch.ones(1000, device=session.device)
    mpiddp.all_reduce(tensor)
    torch.distributed.all_reduce(tensor, group=group)
    torch.cuda.synchronize()
    if session.world.rank == 1:
        time.sleep(150)
    if group is None:
        mpiddp.all_reduce(tensor, "ring")
    else:
        torch.distributed.all_reduce(tensor, group=group)
    torch.cuda.synchronize()
"""

HAS_TWO = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 14)
"""Whether this torch has two implementations of NCCL groups."""


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("what", "implementation"),
    [("call", "0"), ("call", "1"), ("own group", "")],
    ids=["older implementation", "newer implementation", "a group of the program"],
)
def test_a_rank_that_stays_away_ends_the_job_with_a_report(over_nccl, what, implementation):
    if implementation == "1" and not HAS_TWO:
        pytest.skip(f"torch {torch.__version__} has one implementation of NCCL groups")
    env = dict(over_nccl.variables)
    if implementation:
        env["TORCH_DIST_USE_NCCL2"] = implementation
    result = launchers.run(over_nccl.launcher, 2, ["-c", AWAY, what], env=env).expect(6)
    told = [line for line in messages(result) if "NCCL gave up" in line]
    assert len(told) == 1 and told[0].startswith("mpiddp: rank 0 of 2 on ")
    assert f"{10 + QUEUE_SECONDS:g} s after it was queued" in told[0]


SYNCS = (
    ("--sync", "framework"), ("--sync", "ring", "--overlap", "off"),
    ("--sync", "ring", "--overlap", "on"), ("--sync", "direct", "--overlap", "off"),
    ("--sync", "ring", "--wire-dtype", "bfloat16"), ("--sync", "direct", "--wire-dtype", "float16"),
    ("--sync", "parameter-server"), ("--sync", "parameter-server", "--staleness", "2"),
)  # fmt: skip
"""The second and the third come to the same bits: only when they travel differs."""


@pytest.mark.parametrize(
    "ranks",
    [
        pytest.param("cpu", marks=pytest.mark.long),
        pytest.param("nccl", marks=pytest.mark.gpu),
        pytest.param("gloo", marks=pytest.mark.gpu),
    ],
    indirect=True,
)
def test_training(ranks, tmp_path):
    answers = ranks.call(gpu_work.train_each, *SYNCS, timeout=DEADLINE, cwd=tmp_path).values
    for results in zip(*answers, strict=True):
        assert len({result.parameters for result in results}) == 1
        assert results[0].test_metrics["accuracy"] > 0.5
    assert answers[0][1].parameters == answers[0][2].parameters


@pytest.mark.gpu
def test_the_doctors_transport(over_nccl, tmp_path):
    program = ["-m", "mpiddp.doctor", "--allow-shared-gpu"]
    result = launchers.run(
        over_nccl.launcher, over_nccl.ranks, program, env=over_nccl.variables, cwd=tmp_path
    )
    line = next(line for line in result.stdout.splitlines() if "NCCL transport" in line)
    assert "channels by " in line, result


COMMANDS = (
    ["allreduce", "--ranks", "2", "--sizes", "64K", "1M", "--repetitions", "2"],
    ["all-gather", "--ranks", "2", "--sizes", "64K", "--buffers", "gpu", "--repetitions", "2"],
    ["reduce", "--ranks", "2", "--sizes", "1M", "--buffers", "gpu", "--operators", "max"],
    ["allreduce", "--ranks", "2", "--sizes", "1M", "--buffers", "gpu", "--overlap"],
    ["point-to-point", "--sizes", "8", "1M", "--repetitions", "2"],
    ["training-step", "--ranks", "2", "--models", "mlp:megabytes=1", "--repetitions", "2"],
)
OVER_GLOO = ["allreduce", "--ranks", "2", "--sizes", "1M", "--buffers", "private", "gpu"]


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("several", "command"),
    [*(("nccl", command) for command in COMMANDS), ("gloo", OVER_GLOO)],
    indirect=["several"],
    ids=lambda value: value if isinstance(value, str) else " ".join(value),
)
def test_benchmarks(several, command, tmp_path):
    row = several.launcher
    variables = {**row.environment, **several.variables, "MPI4PY_LIBMPI": str(row.libmpi)}
    words = (sys.executable, "-m", "benchmarks", *command, "--launcher", row.mpirun)
    answer = launchers.execute(*words, cwd=tmp_path, env=variables, timeout=DEADLINE)
    assert "rank" in answer.expect(0).stdout

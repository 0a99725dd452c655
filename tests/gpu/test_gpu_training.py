"""How a step is computed, and how ranks share a model, on real GPUs."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch

import fsdp_memory
import launchers
import loading
import observed
from mpiddp.training.data.data_sets import DIGITS, parse_shape
from mpiddp.training.data.seeding import seed_generators
from mpiddp.training.options.config import parse
from mpiddp.training.task.models import convnet
from observed import Observation
from pool import Pool, Pools

DEADLINE = 170.0
SMALL = ("--data", "synthetic", "--samples", "400", "--epochs", "2", "--save-every", "1epoch")
SHARDED = ("--parallel", "fsdp", "--wrap-parameters", "1000")
pytestmark = pytest.mark.gpu


def train_each(
    pool: Pool, folder: Path, ways: dict[str, tuple[str, ...]]
) -> tuple[dict[str, Observation], dict[str, dict[str, torch.Tensor]]]:
    """What rank 0 saw in each training, and the exported weights."""
    lines = [
        [*SMALL, *options, "--name", name, "--export", f"{name}.pt"]
        for name, options in ways.items()
    ]
    called = pool.call(observed.observe_compiled, *lines, timeout=DEADLINE, cwd=folder)
    weights = {name: torch.load(folder / f"{name}.pt", weights_only=True) for name in ways}
    return dict(zip(ways, called.values[0], strict=True)), weights


SLOW = ("--learning-rate", "0.005")
"""So slow that small differences stay small."""


def find_errors(weights: dict[str, dict[str, torch.Tensor]]) -> dict[str, float]:
    """How far each training ended from the plain one, by how far that one went.

    On a CPU that is 0.04 for bf16, and 0.15 or 0.3 if the first step or three are left out, as by a
    loss scaler; 1.4 is another direction.
    """
    configuration = parse([*SMALL, *SLOW])
    seed_generators(configuration.seed)
    begin = convnet(parse_shape(configuration.shape), DIGITS).state_dict()
    rows = {name: join(each, begin) for name, each in {**weights, "begin": begin}.items()}
    way = (rows["plain"] - rows["begin"]).norm()
    return {name: float((rows[name] - rows["plain"]).norm() / way) for name in weights}


def join(weights: dict[str, torch.Tensor], names: Iterable[str]) -> torch.Tensor:
    return torch.cat([weights[name].flatten().float().cpu() for name in names])


def find_difference(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    return max(float((one[name].cpu() - other[name].cpu()).abs().max()) for name in one)


def test_data_that_fits_is_moved_once(gpu: dict[str, str], pool: Pools) -> None:
    found = pool("openmpi", 1, **gpu).call(loading.read_on_gpu, timeout=DEADLINE).values[0]
    assert found == {"on the GPU": True, "pinned": True, "alike": [True, True]}


def test_number_formats_and_layouts(gpu: dict[str, str], pool: Pools, tmp_path: Path) -> None:
    ways: dict[str, tuple[str, ...]] = {
        "plain": ("--deterministic",), "again": ("--deterministic",),
        "bf16": ("--precision", "bf16", "--channels-last"),
        "fp16": ("--precision", "fp16", "--accumulation-steps", "2", "--clip-norm", "10"),
        "compiled": ("--compile", "--precision", "bf16"),
    }  # fmt: skip
    ways = {name: (*SLOW, *options) for name, options in ways.items()}
    seen, weights = train_each(pool("openmpi", 1, **gpu), tmp_path, ways)
    assert find_difference(weights["plain"], weights["again"]) == 0
    assert seen["bf16"].types == {torch.bfloat16}
    assert seen["bf16"].channels_last
    assert seen["fp16"].types == {torch.float16}
    errors = find_errors(weights)
    assert max(errors["bf16"], errors["compiled"]) < 0.15, errors
    assert errors["fp16"] < 0.5, errors


def test_fsdp_does_what_ddp_does(nccl_pool: Pool, tmp_path: Path) -> None:
    clipped = ("--clip-norm", "0.5")
    ways: dict[str, tuple[str, ...]] = {
        "plain": ("--deterministic",), "sharded": ("--deterministic", *SHARDED),
        "offloaded": ("--deterministic", *SHARDED, "--cpu-offload"),
        "clipped": ("--deterministic", *clipped),
        "sharded-clipped": ("--deterministic", *SHARDED, *clipped),
        "fp16": (*SHARDED, "--precision", "fp16"),
    }  # fmt: skip
    seen, weights = train_each(nccl_pool, tmp_path, ways)
    for one, other in (
        ("plain", "sharded"),
        ("plain", "offloaded"),
        ("clipped", "sharded-clipped"),
    ):
        assert find_difference(weights[one], weights[other]) < 1e-4, other
    assert seen["fp16"].types == {torch.float16}


def test_a_rank_has_its_part_and_three_groups_in_memory(nccl_pool: Pool) -> None:
    found: Any = nccl_pool.call(fsdp_memory.measure, "fsdp", timeout=DEADLINE).values
    for each in found:
        assert each.peak < 1.1 * (each.total / len(found) + 3 * each.largest)


def test_one_process_spreads_a_batch_over_its_gpus(pool: Pools, tmp_path: Path) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("one GPU or none")
    ways: dict[str, tuple[str, ...]] = {"plain": (), "spread": ("--parallel", "dp")}
    seen, _ = train_each(pool("openmpi", 1), tmp_path, ways)
    assert seen["spread"].samples == {-(-16 // torch.cuda.device_count())}
    for name in ("loss", "test_loss"):
        assert seen["spread"].row[name] == pytest.approx(seen["plain"].row[name], rel=0.1)


MIXED = """
import os
if os.environ["PMI_RANK"] == "1":
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
from mpiddp.train import main
main()
"""


def test_a_gpu_and_a_cpu_train_one_model(gpu: dict[str, str], tmp_path: Path) -> None:
    words = ["-c", MIXED, *SMALL, "--name", "mixed"]
    result = launchers.run("mpich", 2, words, timeout=DEADLINE, env=gpu, cwd=tmp_path).expect(0)
    assert "has no GPU" in result.stderr and "backend         gloo\n" in result.stderr

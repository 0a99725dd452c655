"""How ranks share a model, and how a step is computed: each option's effect in real trainings."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import observed
import trainings
from observed import Observation
from pool import Pools

pytestmark = pytest.mark.timeout(150)

# 160 samples for training: 5 steps of two ranks in an epoch, 10 in all. Two linear layers.
TOY = ("--data", "toy", "--samples", "200", "--epochs", "2", "--save-every", "never")
STEPS, REHEARSED, LAYERS = 10, 3, 2


def train_each(
    pools: Pools, folder: Path, ways: dict[str, tuple[str, ...]], ranks: int = 2
) -> tuple[dict[str, Observation], dict[str, dict[str, torch.Tensor]], str]:
    """What rank 0 saw in each training, the exported weights, and what was printed."""
    lines = [[*options, "--name", name, "--export", f"{name}.pt"] for name, options in ways.items()]
    called = pools("openmpi", ranks).call(observed.observe, *lines, timeout=120, cwd=folder)
    seen = dict(zip(ways, called.values[0], strict=True))
    weights = {name: torch.load(folder / f"{name}.pt", weights_only=True) for name in ways}
    return seen, weights, called.printed


def find_difference(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    return max(float((one[name] - other[name]).abs().max()) for name in one)


@pytest.mark.mpi
def test_options_of_a_step_have_their_effect(pool: Pools, tmp_path: Path) -> None:
    ways: dict[str, tuple[str, ...]] = {
        "plain": TOY,
        "parts": (*TOY, "--accumulation-steps", "4"),
        "scheduled": (*TOY, "--accumulation-steps", "4", "--sync", "direct", "--overlap", "off"),
        "served": (*TOY, "--accumulation-steps", "4", "--sync", "parameter-server"),
        "narrow": (*TOY, "--precision", "bf16"),
        "clipped": (*TOY, "--clip-norm", "0.01"),
        "smooth": (*TOY, "--label-smoothing", "0.3"),
        "averaged": (*TOY, "--ema", "0.99"),
        "scaled": (*TOY, "--base-batch", "64", "--learning-rate", "0.1"),
        "stepped": (*TOY, "--schedule", "step", "--step-epochs", "0.5", "--step-factor", "0"),
        "risen": (*TOY, "--warmup-epochs", "2"),
    }
    seen, weights, printed = train_each(pool, tmp_path, ways)
    plain = seen["plain"]
    rehearsed = REHEARSED * LAYERS
    assert plain.layers == STEPS * LAYERS + rehearsed
    assert (plain.types, plain.samples) == ({torch.float32}, {16})
    for name in ("parts", "scheduled", "served"):
        assert 0 < find_difference(weights["plain"], weights[name]) < 1e-6, name
        assert seen[name].samples == {4}
        assert seen[name].row["loss"] == pytest.approx(plain.row["loss"], rel=1e-5)
        warm = 0 if name == "served" else rehearsed
        assert seen[name].layers == 4 * STEPS * LAYERS + warm
    # Ranks exchange the small model's one bucket once in a step, not in each pass.
    assert seen["scheduled"].buckets == STEPS + REHEARSED
    assert seen["narrow"].types == {torch.bfloat16}
    assert 0 < find_difference(weights["plain"], weights["narrow"]) < 0.05
    # What is cut to a hundredth moves the weights less.
    moved = [seen[name].row["loss"] for name in ("plain", "clipped")]
    assert moved[1] > moved[0] + 0.05
    assert seen["smooth"].row["loss"] > plain.row["loss"] + 0.05
    assert seen["smooth"].row["test_loss"] < seen["smooth"].row["loss"]
    assert seen["averaged"].row["parameters"] == plain.row["parameters"]
    assert seen["averaged"].row["test_loss"] != plain.row["test_loss"]
    assert find_difference(weights["plain"], weights["averaged"]) > 1e-3
    assert "0.1 x 32 samples per step / base batch 64 = 0.05 at its peak" in printed
    assert seen["scaled"].row["parameters"] == plain.row["parameters"]
    # A rate of 0 from the third step on, and one that has just come to its peak.
    assert seen["stepped"].row["learning_rate"] == 0
    assert seen["stepped"].row["test_loss"] > plain.row["test_loss"] + 0.05
    assert seen["risen"].row["learning_rate"] == pytest.approx(0.05)
    assert plain.row["learning_rate"] < 0.01


REFUSED: dict[str, tuple[tuple[str, ...], str]] = {
    "fp16": (("--precision", "fp16"), "precision: fp16 needs GPUs, found CPUs"),
}


@pytest.mark.mpi
@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_had_is_one_line(name: str, pool: Pools, tmp_path: Path) -> None:
    options, message = REFUSED[name]
    called: Any = pool("openmpi", 2).call(trainings.refuse, *TOY, *options, cwd=tmp_path)
    for said in called.values:
        assert said.startswith(f"2: {message}"), said
        assert "\n" not in said
    assert not (tmp_path / "runs").exists()

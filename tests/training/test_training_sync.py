"""Training with ``--sync``: it learns what plain DDP learns, and says how it did so."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import trainings
from mpiddp.training.options.config import read_toml
from pool import Pool

POINTS, NARROW_POINTS = 0.003, 0.01
"""Of accuracy, by which a synchronous run may be worse than the framework's, and one that rounds
its gradients to 8 bits."""
PAIR = ("--nodelist=node[1-2]", "--nodes=2")
SERVED = ("--sync", "parameter-server")
SMALL = ("--data", "toy", "--samples", "200", "--epochs", "2")
EPOCHS = 6  # Twelve runs with stale gradients, beside other work, came to 98.3 % and more.


def train(pool: Pool, folder: Path, name: str, *options: str) -> tuple[str, Path]:
    """A run in ``folder``; what it prints, and its directory."""
    called = pool.call(trainings.run, ["--name", name, *options], timeout=120, cwd=folder)
    return called.printed, folder / "runs" / name


def train_each(
    pool: Pool, folder: Path, ways: dict[str, Sequence[str]]
) -> tuple[str, dict[str, dict[str, Any]]]:
    """A run for each of ``ways``; what they print, and each run's last row of metrics."""
    lines = [["--name", name, *options] for name, options in ways.items()]
    called = pool.call(trainings.run, *lines, timeout=120, cwd=folder)
    return called.printed, {name: read_last(folder / "runs" / name) for name in ways}


def read_last(run: Path) -> dict[str, Any]:
    return trainings.read_rows(run)[-1]


@pytest.mark.mpi
def test_synchronous_ways_reach_the_frameworks_accuracy(pool, tmp_path):
    # The digits of the test split are 359: one of them is a quarter of a point.
    ways = {
        "plain": (),
        "narrow": ("--sync", "ring", "--transport", "mpi", "--wire-dtype", "bfloat16"),
        "served": (*SERVED, "--servers", "2"),
    }
    ways = {name: ("--epochs", str(EPOCHS), *options) for name, options in ways.items()}
    _, rows = train_each(pool("openmpi", 2), tmp_path, ways)
    accuracy = {name: row["test_accuracy"] for name, row in rows.items()}
    assert accuracy["plain"] > 0.97
    assert accuracy["narrow"] >= accuracy["plain"] - NARROW_POINTS
    assert accuracy["served"] >= accuracy["plain"] - POINTS
    assert set(rows["served"]["staleness"]) == {"0"}


@pytest.mark.mpi
def test_stale_gradients_train_as_well_and_their_staleness_is_told(pool, tmp_path):
    options = ["--staleness", "2", "--server-placement", "dedicated", "--straggler", "0=2"]
    options += ["--epochs", str(EPOCHS)]
    printed, run = train(pool("openmpi", 3), tmp_path, "stale", *SERVED, *options)
    row = read_last(run)
    assert row["test_accuracy"] > 0.96
    counts = {int(late): times for late, times in row["staleness"].items()}
    # Two workers have 1,438 samples, and each takes 16 of its own half in a step.
    assert sum(counts.values()) == EPOCHS * 2 * 45
    mean = sum(late * times for late, times in counts.items()) / sum(counts.values())
    assert f"Staleness, in updates: mean {mean:.2f}, at most {max(counts)} (" in printed
    assert max(counts) <= 5


@pytest.mark.mpi
def test_only_workers_are_counted_where_servers_are_dedicated(pool, tmp_path):
    options = (*SMALL, *SERVED, "--server-placement=dedicated")
    printed, run = train(pool("openmpi", 3), tmp_path, "dedicated", *options)
    assert "16 samples per worker x 2 workers = 32 samples per step" in printed
    assert "Weights: 1 dedicated parameter server, 2 workers in step" in printed
    # 160 samples, half of them for each worker.
    assert read_last(run)["step"] == 2 * 5
    # Two ranks that average their gradients come to the same.
    _, plain = train(pool("openmpi", 2), tmp_path, "plain", *SMALL)
    for name in ("loss", "test_loss", "learning_rate"):
        assert read_last(run)[name] == pytest.approx(read_last(plain)[name], rel=1e-5)


@pytest.mark.mpi
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([*SERVED, "--servers", "3"], "3 servers need as many ranks, found 2"),
        ([*SERVED, "--server-placement=dedicated", "--straggler=1=3"], "rank 1 computes nothing"),
        (["--sync", "central"], "central leaves out the buffers of 1 of 2 ranks"),
    ],
)
def test_impossible_roles_are_refused_on_every_rank(options, message, pool, tmp_path):
    called = pool("openmpi", 2).call(trainings.refuse, *options, cwd=tmp_path)
    for said in called.values:
        assert message in said and said.startswith("2: ") and "\n" not in said
    assert not (tmp_path / "runs").exists()


@pytest.mark.mpi
def test_an_algorithm_that_is_no_all_reduce_is_refused_before_the_first_step(pool, tmp_path):
    called = pool("openmpi", 3).call(
        trainings.refuse_wrong, *SMALL, "--sync", "double", cwd=tmp_path
    )
    said = "double on 3 ranks is no all-reduce: step 1: the contribution of rank 1 is added twice"
    assert called.values == [f"1: {said}"] * 3
    assert not (tmp_path / "runs").exists()


@pytest.mark.mpi
def test_the_choice_of_overlap_is_measured_told_and_used_again(pool, tmp_path):
    printed, run = train(pool("openmpi", 2), tmp_path, "measured", *SMALL, "--sync", "direct")
    (line,) = [line for line in printed.splitlines() if line.startswith("Gradients: ")]
    found = re.fullmatch(
        r"Gradients: direct over transport auto (during|after) the backward pass of their bucket "
        r"\(([0-9.]+) ms with overlap, ([0-9.]+) without"
        r"(: overlap is chosen if it saves more than 5%, since less may be noise)?\)",
        line,
    )
    assert found
    during = found[1] == "during"
    saved = 1 - float(found[2]) / float(found[3])
    assert (found[4] is not None) == (not during and saved > 0) or abs(saved) < 0.015
    # 5 %, but the times are told in hundredths of a millisecond.
    assert saved > 0.035 if during else saved < 0.065
    settings = read_toml(run / "config.toml")
    assert settings["overlap"] == ("on" if during else "off")
    # That choice, and the other one, lead to the same bits.
    ways = {way: (*SMALL, "--sync", "direct", "--overlap", way) for way in ("on", "off")}
    printed, rows = train_each(pool("openmpi", 2), tmp_path, ways)
    assert "ms with overlap" not in printed
    for row in rows.values():
        assert row["parameters"] == read_last(run)["parameters"]


@pytest.mark.mpi
def test_running_averages_are_the_same_on_all_ranks(pool, tmp_path):
    # The trainer refuses parameters and buffers that differ between ranks.
    words = (*SMALL, "--model", "trainings:build_normalised", "--sync")
    ways = {sync: (*words, sync) for sync in ("framework", "ring")}
    train_each(pool("openmpi", 2), tmp_path, ways)


@pytest.mark.gpu
def test_gradients_of_a_gpu_are_served_through_pinned_memory(pool, tmp_path):
    if not torch.cuda.device_count():
        pytest.skip("no GPU")
    _, plain = train(pool("openmpi", 1), tmp_path, "plain", *SMALL)
    printed, run = train(pool("openmpi", 1), tmp_path, "served", *SMALL, *SERVED)
    assert "Starting distributed training on 1 GPU" in printed
    assert read_last(run)["test_loss"] == pytest.approx(read_last(plain)["test_loss"], rel=1e-4)


@pytest.mark.long
@pytest.mark.slurm
def test_gradients_become_one_between_nodes(slurm_cluster, cluster_pool, tmp_path):
    launcher = slurm_cluster.srun(*PAIR, "--distribution=plane=3", "--exclusive")
    ways = {
        "plain": (),
        "schedule": ("--sync", "auto"),
        "central": SERVED,
        "sharded": (*SERVED, "--servers", "3"),
        "fsdp": ("--parallel", "fsdp", "--wrap-parameters", "100"),
        "unbounded": (*SERVED, "--servers", "2", "--staleness", "unlimited"),
    }
    small = {name: (*SMALL, *options) for name, options in ways.items()}
    _, rows = train_each(cluster_pool(launcher, 4), tmp_path, small)
    losses = {name: row["test_loss"] for name, row in rows.items()}
    for name in ("schedule", "central", "sharded", "fsdp"):
        assert losses[name] == pytest.approx(losses["plain"], rel=1e-4), losses
    assert losses["unbounded"] == pytest.approx(losses["plain"], rel=0.3), losses
    words = [*SMALL, "--parallel", "fsdp", "--shard-within", "node"]
    for said in cluster_pool(launcher, 4).call(trainings.refuse, *words, cwd=tmp_path).values:
        assert "equally many ranks on each node, found 3, 1: use --shard-within world" in said

"""A run that was interrupted ends as the one that was not, bit for bit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import interrupted
from pool import Pools

TIMES = {"seconds", "samples_per_second", "load_seconds", "evaluate_seconds", "attempt"}
# 128 samples for training: 6 steps of 3 ranks in an epoch, 18 in all.
SMALL = (
    "--data", "synthetic", "--samples", "160", "--epochs", "3", "--batch-size", "8",
    "--evaluate-every", "2", "--save-every", "1step",
)  # fmt: skip
SERVED = ("--sync", "parameter-server")
WAYS = {
    "framework": (),
    "adamw": ("--optimizer", "adamw"),
    "ring": ("--sync", "ring"),
    "auto": ("--sync", "auto", "--overlap", "on"),
    "narrow": ("--sync", "ring", "--wire-dtype", "bfloat16", "--overlap", "off"),
    "served": (*SERVED, "--servers", "2"),
}


def read_rows(run: Path) -> list[dict[str, Any]]:
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [{name: value for name, value in row.items() if name not in TIMES} for row in rows]


def assert_equal_ends(folder: Path, cut: str) -> None:
    rows = [read_rows(folder / "runs" / name) for name in ("whole", cut)]
    assert rows[0] == rows[1]
    whole, found = (interrupted.read_last(folder / "runs" / name) for name in ("whole", cut))
    assert whole.keys() == found.keys()
    assert [name for name in whole if not torch.equal(whole[name], found[name])] == []
    assert any(name.startswith("rank-1.random.torch") for name in whole)


@pytest.mark.mpi
@pytest.mark.timeout(150)
@pytest.mark.parametrize("way", WAYS)
def test_a_resumed_run_ends_as_the_uninterrupted_one(way: str, pool: Pools, tmp_path: Path) -> None:
    # The sum of two has only one order; with three it depends on a gradient's place in its bucket.
    words, ranks = [*SMALL, *WAYS[way]], pool("openmpi", 3)
    ranks.call(interrupted.run, [*words, "--name", "whole"], [], cwd=tmp_path)
    # The first step; an epoch's last but one, its last, and the next one's first; the last but one.
    cuts = [1, 11, 12, 13, 17]
    called = ranks.call(interrupted.run, [*words, "--name", "cut"], cuts, cwd=tmp_path)
    begun = [line for line in called.printed.splitlines() if line.startswith("Resumed from")]
    for line, cut in zip(begun, cuts, strict=True):
        assert line.startswith(f"Resumed from runs/cut/checkpoints/step-{cut}: ")
    assert_equal_ends(tmp_path, "cut")


@pytest.mark.mpi
@pytest.mark.timeout(150)
def test_a_dedicated_server_is_resumed(pool: Pools, tmp_path: Path) -> None:
    words = [*SMALL, *SERVED, "--server-placement", "dedicated"]
    ranks = pool("openmpi", 3)
    ranks.call(interrupted.run, [*words, "--name", "whole"], [], cwd=tmp_path)
    ranks.call(interrupted.run, [*words, "--name", "cut"], [3, 8, 20], cwd=tmp_path)
    assert_equal_ends(tmp_path, "cut")

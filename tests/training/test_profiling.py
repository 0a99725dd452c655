"""Traces of training steps."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import trainings
from mpiddp.training.options.config import parse
from mpiddp.training.records.profiling import ACTIVE, WAIT, WARM_UP, StepProfiler
from pool import Pools

TOY = ["--data", "toy", "--samples", "400", "--epochs", "1"]
CPU = torch.device("cpu")


def read_events(path: Path) -> list[dict[str, Any]]:
    events: list[dict[str, Any]] = json.loads(path.read_text())["traceEvents"]
    return events


def count_multiplications(path: Path) -> int:
    return sum(event.get("name") == "aten::mm" for event in read_events(path))


def run_steps(path: Path, steps: int, warnings: list[str]) -> None:
    profiler = StepProfiler(path, CPU, warnings.append)
    for _ in range(steps):
        torch.ones(3, 4) @ torch.ones(4, 5)
        profiler.step()
    profiler.close()


@pytest.mark.parametrize("more", [0, 7, 2 - ACTIVE])
def test_some_steps_are_recorded(more: int, tmp_path: Path) -> None:
    path, warnings = tmp_path / "profile" / "rank-0.json", []
    run_steps(path, WAIT + WARM_UP + ACTIVE + more, warnings)
    assert warnings == []
    assert count_multiplications(path) == ACTIVE + min(more, 0)
    (first, *_) = (event for event in read_events(path) if event.get("name") == "aten::mm")
    assert first["args"]["Input Dims"] == [[3, 4], [4, 5]]
    assert any(event.get("name") == "[memory]" for event in read_events(path))
    assert [each.name for each in path.parent.iterdir()] == [path.name]


def test_what_cannot_be_recorded_is_told(tmp_path: Path) -> None:
    warnings: list[str] = []
    run_steps(tmp_path / "a.json", 3, warnings)
    assert warnings == [f"no profile: it begins after {WAIT + WARM_UP} steps"]
    (tmp_path / "file").touch()
    run_steps(tmp_path / "file" / "a.json", 20, warnings)
    assert len(warnings) == 2 and "a.json could not be written" in warnings[1]


@pytest.mark.mpi
def test_the_ranks_that_are_named_write_a_trace(pool: Pools, tmp_path: Path) -> None:
    words = [["--name", name, *TOY, "--profile", name] for name in ("all", "1")]
    pool("openmpi", 2).call(trainings.run, *words, cwd=tmp_path)
    for said in pool("openmpi", 2).call(trainings.refuse, *TOY, "--profile", "2").values:
        assert said.startswith("2: --profile 2 names none of the job's ranks")
    for name, expected in (("all", [0, 1]), ("1", [1])):
        folder = tmp_path / "runs" / name / "profile"
        assert sorted(path.name for path in folder.iterdir()) == [
            f"rank-{rank}.json" for rank in expected
        ]
        names = {event.get("name") for event in read_events(folder / "rank-1.json")}
        assert {"aten::addmm", "gloo:all_reduce"} <= names


@pytest.mark.parametrize("words", [["--profile"], ["--profile", *TOY], ["--profile=0"]])
def test_rank_0_is_meant_where_no_rank_is_named(words: list[str]) -> None:
    assert parse(words).profile == "0"
    assert parse(["--profile", "1", *TOY]).profile == "1"

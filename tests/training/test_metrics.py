"""What a run reports."""

from __future__ import annotations

import contextlib
import json
import math
import re
import resource
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from mpiddp.training.records import metrics_file
from mpiddp.training.records.metrics import (
    Row,
    StepsRow,
    Totals,
    describe_end,
    describe_epoch,
    describe_staleness,
    describe_start,
)
from mpiddp.training.records.metrics_file import MetricsFile, read_last_row

ROW = Row(
    attempt=1,
    epoch=1,
    step=45,
    loss=0.2345674,
    metrics={"accuracy": 0.92344},
    learning_rate=0.05,
    samples_per_second=1000.0,
    seconds=1.5,
)

TIMES = {
    "seconds",
    "samples_per_second",
    "stages",
    "data_seconds",
    "bandwidth",
    "host_memory",
    "evaluate_seconds",
}
"""Values of a row that differ between two runs."""

STEPS_ROW = StepsRow(
    attempt=1, epoch=1, step=5, epochs=0.1, loss=2.5, metrics={"gap": 3.0}, learning_rate=0.05
)


def test_rows_of_steps_wait_and_are_not_doubled(tmp_path, monkeypatch):
    path = tmp_path / "metrics.jsonl"
    rows = [replace(STEPS_ROW, step=step) for step in (5, 40, 45, 50)]
    rows[3] = replace(rows[3], loss=math.nan)
    file = MetricsFile(path)
    for row in rows[:3]:
        file.append(row)
    assert not path.exists()
    file.append(ROW)
    monkeypatch.setattr(metrics_file, "WRITE_SECONDS", 0.0)
    file.append(rows[3])
    written = [*rows[:3], ROW, rows[3]]
    assert path.read_text() == "".join(f"{row.to_json()}\n" for row in written)
    assert read_last_row(path) == ROW
    # The next attempt goes on from step 40. Rows of epochs stay.
    MetricsFile(path, 40)
    assert path.read_text() == "".join(f"{row.to_json()}\n" for row in (*rows[:2], ROW))


def test_the_metrics_of_a_task_are_in_the_row_and_in_the_line() -> None:
    row = replace(ROW, metrics={"gap": 2.5}, test_loss=0.5, test_metrics={"gap": 3.0})
    values = json.loads(row.to_json())
    assert (values["gap"], values["test_gap"], values["test_loss"]) == (2.5, 3.0, 0.5)
    assert "accuracy" not in values
    assert describe_epoch(ROW) == "Epoch 1 - Avg Loss: 0.234567, Accuracy: 92.34%"
    assert describe_epoch(row) == "Epoch 1 - Avg Loss: 0.234567, Gap: 2.5, Test Gap: 3"
    without = replace(row, metrics={}, test_metrics={})
    assert describe_epoch(without) == "Epoch 1 - Avg Loss: 0.234567, Test Loss: 0.500000"
    assert describe_end(without, 1, Path("runs/first")).startswith("Training done: test loss 0.5")


def test_a_row_is_read_as_it_was_written() -> None:
    tested = replace(
        ROW, test_loss=0.5, test_metrics={"accuracy": 0.9, "top5_accuracy": 1.0},
        stages={"read": 0.1}, bandwidth=[None, 2.5], staleness={0: 6, 3: 1}, parameters="ab",
    )  # fmt: skip
    for row in (ROW, tested, replace(tested, metrics={}, test_metrics={})):
        assert Row.from_json(row.to_json()) == row
    # A metric that is not finite is null.
    row = replace(ROW, metrics={"ratio": math.inf, "gap": 1.5}, test_metrics={"ratio": math.nan})
    values = json.loads(row.to_json())
    assert (values["ratio"], values["gap"], values["test_ratio"]) == (None, 1.5, None)
    assert math.isnan(Row.from_json(row.to_json()).metrics["ratio"])


def test_sums_are_the_same_now_and_later() -> None:
    def count_positive(outputs: torch.Tensor, targets: torch.Tensor) -> Any:
        return (outputs > 0).sum() if targets.any() else 0

    cpu = torch.device("cpu")
    now, later = (Totals(cpu, {"positive": count_positive}) for _ in range(2))
    # As a GPU, whose values are not read in each step.
    later._defers = True
    for step in range(5):
        outputs, targets = torch.linspace(-1, 2, 7) / 3, torch.full((7,), step % 2)
        for totals in (now, later):
            totals.add(outputs[step].exp().requires_grad_(), outputs, targets)
            if step == 2:
                before = totals.save()
                totals.add(torch.tensor(math.nan), outputs, targets)
                totals.restore(before)
                totals.leave_out()
    assert not any(later._sums[:2])
    assert torch.equal(now.sums, later.sums)
    assert now.sums[1:].tolist() == [35, 1, 2 * int((outputs > 0).sum())]


@contextlib.contextmanager
def writing_forbidden(most: int = 0) -> Iterator[None]:
    """No file can grow beyond so many bytes meanwhile, as on a full disk."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (most, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_half_a_row_of_a_killed_attempt_is_removed(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"epoch": 1}\n{"epoch": 2, "los')
    # Whole rows outlive whatever stops the repair.
    with writing_forbidden(), contextlib.suppress(OSError):
        MetricsFile(path)
    assert path.read_text().startswith('{"epoch": 1}\n')
    MetricsFile(path).append(ROW)
    assert [json.loads(line)["epoch"] for line in path.read_text().splitlines()] == [1, 1]


def test_metrics_have_whole_rows_and_lose_none(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    file = MetricsFile(path)
    assert file.append(ROW) == ""
    before = path.read_text()
    with writing_forbidden(len(before) + 20):
        for _ in range(2):
            problem = file.append(ROW)
            assert "metrics.jsonl could not be written: File too large" in problem
            assert path.read_text() == before
    assert file.append(ROW) == ""
    assert path.read_text() == 4 * before


def test_the_line_of_staleness() -> None:
    assert describe_staleness({0: 6, 1: 1, 3: 1}) == (
        "Staleness, in updates: mean 0.50, at most 3 (0: 75.0%, 1: 12.5%, 3: 12.5%)"
    )
    line = describe_staleness(dict.fromkeys(range(8), 1))
    assert "at most 7" in line and line.endswith("5: 12.5%, 2 more)")


@pytest.mark.parametrize(
    ("device", "nodes", "first", "product"),
    [
        ("cpu", [1], "1 CPU", "1 node x 1 rank per node = 1 rank"),
        ("cuda", [4, 4, 4, 4], "16 GPUs", "4 nodes x 4 ranks per node = 16 ranks"),
        ("cuda", [2, 3, 3], "8 GPUs", "2 nodes x 3 ranks + 1 node x 2 ranks = 8 ranks"),
    ],
)
def test_the_first_lines(device: str, nodes: list[int], first: str, product: str) -> None:
    lines = describe_start(device, nodes, "node001", batch_size=64, workers=sum(nodes))
    assert lines[:3] == [
        f"Starting distributed training on {first}",
        product,
        "Master node: node001",
    ]
    total = 64 * sum(nodes)
    assert re.fullmatch(
        rf"Effective batch: 64 samples per rank x \d+ ranks? = {total} samples per step", lines[3]
    )

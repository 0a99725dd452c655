"""What a run reports: sums over all ranks, rows of ``metrics.jsonl``, lines on the console."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from mpiddp.launch.job_directory import check_attempt
from mpiddp.launch.launcher.hostnames import count_noun

SHOWN = 6
"""Values of a distribution that fit into a line."""


@dataclass(frozen=True)
class Average:
    loss: float
    """Mean cross entropy per sample, in nats."""
    accuracy: float
    """Share of samples whose class was right, 0 to 1."""
    samples: int


class Totals:
    """Running sums of one rank, kept on its device so that no step waits for them."""

    def __init__(self, device: torch.device) -> None:
        self._sums = torch.zeros(3, dtype=torch.float64, device=device)

    @torch.no_grad()
    def add(self, loss: torch.Tensor, outputs: torch.Tensor, labels: torch.Tensor) -> None:
        """Count a batch: its mean loss, scores (samples, classes), and labels (samples,)."""
        correct = (outputs.argmax(dim=1) == labels).sum()
        self._sums[0] += loss.double() * len(labels)
        self._sums[1] += correct
        self._sums[2] += len(labels)

    def reduce(self) -> Average:
        """Sum over all ranks, by all-reduce, and return the averages. Every rank must call."""
        dist.all_reduce(self._sums)
        loss, correct, samples = self._sums.tolist()
        return Average(loss / samples, correct / samples, round(samples))


@dataclass(frozen=True, kw_only=True)
class Row:
    """One line of ``metrics.jsonl``: an epoch."""

    attempt: int
    """Of the run, counted from 1."""
    epoch: int
    """Counted from 1."""
    step: int
    """Steps taken so far: batches of each worker, on average where servers share them out."""
    loss: float
    """Mean training loss over the samples of all ranks, as they were trained on."""
    accuracy: float
    """The same for the share of right classes, 0 to 1."""
    test_loss: float | None = None
    """Mean loss over the test samples; None in an epoch without evaluation."""
    test_accuracy: float | None = None
    """Share of the test samples whose class was right; None without evaluation."""
    learning_rate: float
    """That of the epoch's last step."""
    samples_per_second: float
    """Samples trained on, on all ranks, by ``seconds``."""
    seconds: float
    """Rank 0's time for the epoch's training, without evaluation."""
    load_seconds: float
    """The part of ``seconds`` that rank 0 waited for batches."""
    evaluate_seconds: float | None = None
    """Rank 0's time for the evaluation; None without one."""
    staleness: dict[int, int] | None = None
    """How many gradients, since the run began, met weights that so many updates had changed since
    their worker was given them, over all parameter servers; None without servers."""
    parameters: str | None = None
    """SHA-256 of the trained parameters, in the last epoch; the same on all ranks."""


class MetricsFile:
    """``metrics.jsonl``, one JSON object per line; attempts of a run follow one another."""

    def __init__(self, path: Path) -> None:
        self._path = path
        if path.exists():
            # What a killed process left of its last row is removed in one system call, so that a
            # kill leaves the whole rows. Nothing is written anew.
            os.truncate(path, path.read_bytes().rfind(b"\n") + 1)

    def append(self, row: Row) -> None:
        check_attempt()
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(asdict(row), allow_nan=False) + "\n")


def describe_start(
    device: str, ranks_per_node: Sequence[int], master: str, batch_size: int, workers: int
) -> list[str]:
    """Return the console's first lines; ``workers``: how many ranks compute."""
    ranks, nodes = sum(ranks_per_node), len(ranks_per_node)
    kind = "GPU" if device == "cuda" else device.upper()
    if len(set(ranks_per_node)) == 1:
        product = f"{count_noun(nodes, 'node')} x {count_noun(ranks_per_node[0], 'rank')} per node"
    else:
        sizes = sorted(Counter(ranks_per_node).items(), reverse=True)
        product = " + ".join(
            f"{count_noun(n, 'node')} x {count_noun(size, 'rank')}" for size, n in sizes
        )
    computing = "rank" if workers == ranks else "worker"
    computers = count_noun(workers, computing)
    per_step = count_noun(batch_size * workers, "sample")
    per_rank = count_noun(batch_size, "sample")
    return [
        f"Starting distributed training on {count_noun(ranks, kind)}",
        f"{product} = {count_noun(ranks, 'rank')}",
        f"Master node: {master}",
        f"Effective batch: {per_rank} per {computing} x {computers} = {per_step} per step",
    ]


def describe_epoch(row: Row) -> str:
    line = f"Epoch {row.epoch} - Avg Loss: {row.loss:.6f}, Accuracy: {row.accuracy:.2%}"
    if row.test_accuracy is not None:
        line += f", Test Accuracy: {row.test_accuracy:.2%}"
    return line


def describe_staleness(counts: Mapping[int, int]) -> str:
    """Return the console's line on gradients, by the number of updates that they were late."""
    total = sum(counts.values())
    mean = sum(late * count for late, count in counts.items()) / total
    shares = [f"{late}: {count / total:.1%}" for late, count in list(counts.items())[:SHOWN]]
    rest = len(counts) - len(shares)
    more = f", {rest} more" if rest else ""
    return (
        f"Staleness, in updates: mean {mean:.2f}, at most {max(counts)} ({', '.join(shares)}{more})"
    )


def describe_end(accuracy: float, epochs: int, seconds: float, directory: Path) -> str:
    return (
        f"Training done: test accuracy {accuracy:.2%} after {count_noun(epochs, 'epoch')} in "
        f"{seconds:.1f} s (run directory {directory})"
    )

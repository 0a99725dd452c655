"""What a run reports: sums over all ranks, the rows of them, lines on the console."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import torch
import torch.distributed as dist

from mpiddp.files import convert, decode
from mpiddp.training.data.structure import count_samples
from mpiddp.training.records.history import STEPS
from mpiddp.wording import count_noun

Metric: TypeAlias = Callable[[Any, Any], torch.Tensor]
"""From a model's outputs and the targets to the sum over the samples, a scalar."""
SHARES = frozenset({"accuracy", "top5_accuracy"})
"""Metrics of 0 to 1 that are shown in percent."""
SHOWN = 6
"""Values of a distribution that fit into a line."""
MOST_PENDING = 1024
"""Batches whose values a GPU may hold at once."""


@dataclass(frozen=True)
class Average:
    loss: float
    """Mean per sample."""
    metrics: dict[str, float]
    """Mean per sample, by name."""
    samples: int
    left_out: int = 0
    """Batches that count for nothing, since their loss was not finite."""


class Saved(NamedTuple):
    """What `Totals` have counted."""

    sums: list[float]
    pending: list[tuple[int, list[torch.Tensor]]]


class Totals:
    """Running sums of one rank, in float64. No step waits for a GPU.

    What a GPU has computed is added up later, but in the order of the batches, so that the sums do
    not depend on when they are read.
    """

    def __init__(self, device: torch.device, metrics: Mapping[str, Metric]) -> None:
        """``metrics``: by name, from outputs and targets of a batch to the sum over its samples."""
        self._device = device
        self._defers = device.type != "cpu"
        self._metrics, self._functions = metrics, tuple(metrics.values())
        self._sums = [0.0] * (3 + len(metrics))
        """Of losses, samples, batches left out, and metrics."""
        self._pending: list[tuple[int, list[torch.Tensor]]] = []
        """Samples, mean loss and metrics of batches that are not added yet."""

    def add(self, loss: torch.Tensor | float, outputs: Any, targets: Any) -> None:
        """Count a batch: its mean loss, and outputs and targets of shapes (samples, …).

        A metric may return a plain number, for example if it has nothing to count.
        """
        samples, values = count_samples(targets), [loss]
        with torch.no_grad():
            for metric in self._functions:
                values.append(metric(outputs, targets))
            if self._defers:
                # Neither graphs nor outputs are kept until then.
                self._pending.append((samples, [self._hold(value) for value in values]))
            else:
                self._count(samples, values)
        if len(self._pending) == MOST_PENDING:
            self._settle()

    def _hold(self, value: torch.Tensor | float) -> torch.Tensor:
        held = torch.as_tensor(value, dtype=torch.float64, device=self._device)
        return (held.clone() if held is value else held).detach().reshape(())

    def _count(self, samples: int, values: Sequence[torch.Tensor | float]) -> None:
        sums, place = self._sums, 3
        sums[0] += float(values[0]) * samples
        sums[1] += samples
        for value in values[1:]:
            sums[place] += float(value)
            place += 1

    def _settle(self) -> None:
        """Wait for the GPU, and add what it has computed."""
        if not self._pending:
            return
        columns = len(self._sums) - 2
        # One copy from the device for all of them.
        flat = [value for _, values in self._pending for value in values]
        rows = torch.stack(flat).view(-1, columns).tolist()
        for (samples, _), row in zip(self._pending, rows, strict=True):
            self._count(samples, row)
        self._pending = []

    def leave_out(self) -> None:
        """Count a batch whose loss is not finite."""
        self._sums[2] += 1

    def save(self) -> Saved:
        """What was counted so far, without waiting for it."""
        return Saved(self._sums[:], self._pending[:])

    def restore(self, saved: Saved) -> None:
        """Count nothing that came after ``saved``."""
        self._sums, self._pending = saved.sums[:], saved.pending[:]

    @property
    def sums(self) -> torch.Tensor:
        """This rank's, of losses, samples, batches left out, and metrics; on the CPU, a copy."""
        self._settle()
        return torch.tensor(self._sums, dtype=torch.float64)

    def load(self, sums: torch.Tensor) -> None:
        """Go on from these sums. Raises ValueError if they are of other metrics."""
        if sums.shape != (len(self._sums),):
            raise ValueError(f"expected {len(self._sums)} sums, found shape {tuple(sums.shape)}")
        self._sums, self._pending = sums.tolist(), []

    def reduce(self) -> Average:
        """Sum over all ranks, by all-reduce, and return the averages. Every rank must call.

        They are NaN if nothing was counted.
        """
        total = self.sums.to(self._device)
        dist.all_reduce(total)
        loss, samples, left_out, *sums = total.tolist()
        means = [each / samples if samples else math.nan for each in (loss, *sums)]
        named = dict(zip(self._metrics, means[1:], strict=True))
        return Average(means[0], named, round(samples), round(left_out))


@dataclass(frozen=True, kw_only=True)
class Row:
    """One line of ``metrics.jsonl``: an epoch, with the means over the samples of all ranks.

        row: mpiddp.training.Row = trainer.fit()
        print(row.epoch, row.loss, row.accuracy, row.test_loss, row.test_accuracy)

    Metrics have the names of the file: ``accuracy`` of the training samples, ``test_accuracy`` of
    the test samples, which is None in an epoch without an evaluation. In ``metrics`` and
    ``test_metrics`` they are by the names that the task gives them.
    """

    attempt: int
    """Of the run, counted from 1."""
    epoch: int
    """Counted from 1."""
    step: int
    """Steps taken so far: batches of each worker."""
    loss: float
    """Mean training loss over the samples of all ranks, as they were trained on."""
    metrics: dict[str, float]
    """The same for each metric of the task; in the file, a key for each."""
    test_loss: float | None = None
    """Mean loss over the test samples; None in an epoch without evaluation."""
    test_metrics: dict[str, float] | None = None
    """Metrics over the test samples; None without evaluation. In the file ``test_<name>``."""
    learning_rate: float
    """That of the epoch's last step."""
    samples_per_second: float
    """Samples trained on, on all ranks, by ``seconds``."""
    seconds: float
    """Rank 0's time for the epoch's training, without evaluation."""
    stages: dict[str, float] = field(default_factory=dict)
    """Seconds of each stage of the epoch's steps (`mpiddp.training.step.stages`), the mean over
    ranks that compute."""
    data_seconds: dict[str, float] = field(default_factory=dict)
    """Of reading and of transforming the epoch's samples, by a rank or its workers, whether or not
    a step waited for it; the mean over ranks that compute."""
    sent_bytes: list[int] = field(default_factory=list)
    """Of gradients and weights, by each rank to others (`mpiddp.training.step.traffic`)."""
    bandwidth: list[float | None] = field(default_factory=list)
    """Of each rank: bytes sent per second in which gradients were under way; None if unknown."""
    network: list[dict[str, Any]] | None = None
    """Of each node, if it is tracked: its host, and what `mpiddp.training.records.network` says."""
    host_memory: int = 0
    """The most that a rank's process has had in memory, in bytes."""
    gpu_memory: int | None = None
    """The most that a rank's tensors have had on its GPU, in bytes; None on CPUs."""
    left_out: int = 0
    """Batches of all ranks whose loss was not finite, with on_nan = "skip"."""
    evaluate_seconds: float | None = None
    """Rank 0's time for the evaluation; None without one."""
    staleness: dict[int, int] | None = None
    """How many gradients, since the run began, met weights that so many updates had changed since
    their worker was given them, over all parameter servers; None without servers."""
    parameters: str | None = None
    """SHA-256 of the trained parameters, in the last epoch; the same on all ranks."""

    def __getattr__(self, name: str) -> Any:
        """A metric, by its name in the file."""
        known = set(self.__dict__)
        # A copy, for example, is asked for more before it has any field.
        values = {} if name.startswith("__") or not known else self.list_values()
        if name in values:
            return values[name]
        names = ", ".join(each for each in values if each not in known)
        raise AttributeError(f"a row has no {name!r}; its metrics are {names or 'none'}")

    def list_values(self) -> dict[str, Any]:
        """All by name. Metrics follow the loss of their kind."""
        values: dict[str, Any] = {}
        for name, value in asdict(self).items():
            if name == "metrics":
                values.update(value)
            elif name == "test_metrics":
                found = value or dict.fromkeys(self.metrics)
                values.update({f"test_{metric}": each for metric, each in found.items()})
            else:
                values[name] = value
        return values

    def to_json(self) -> str:
        """One line."""
        return _dump(self.list_values())

    @classmethod
    def from_json(cls, line: str | bytes) -> Row:
        """What `to_json` has written; a metric that was not finite is NaN. Raises ContentError."""
        values = decode(line, dict[str, Any])
        if values.get("loss", "") is None:
            values["loss"] = math.nan
        known = {each.name for each in fields(cls)}
        own = {name: each for name, each in values.items() if name in known}
        # Metrics follow the loss of their kind.
        names = list(values)
        middle = names.index("test_loss") if "test_loss" in names else len(names)

        def select(names: Sequence[str]) -> dict[str, float]:
            found = {name: values[name] for name in names if name not in known}
            return {name: math.nan if each is None else each for name, each in found.items()}

        tested = {name.removeprefix("test_"): each for name, each in select(names[middle:]).items()}
        own["metrics"] = select(names[:middle])
        own["test_metrics"] = tested if values.get("test_loss") is not None else None
        return convert(own, cls)


@dataclass(frozen=True, kw_only=True)
class StepsRow:
    """One line of ``metrics.jsonl`` with ``log_every``: some steps of rank 0."""

    kind: str = STEPS
    attempt: int
    epoch: int
    step: int
    """The last of them; they follow the row before, or the beginning of epoch or attempt."""
    epochs: float
    """Trained so far, with a fraction."""
    loss: float
    """Mean training loss over rank 0's samples of these steps."""
    metrics: dict[str, float]
    """The same for each metric; in the file, a key for each."""
    learning_rate: float
    """That of the last step."""

    def list_values(self) -> dict[str, Any]:
        """All by name."""
        values = asdict(self)
        metrics: dict[str, float] = values.pop("metrics")
        return values | metrics

    def to_json(self) -> str:
        """One line."""
        return _dump(self.list_values())


def _dump(values: Mapping[str, Any]) -> str:
    """A metric that is not finite is null: JSON has no such numbers."""
    finite = {
        name: None if isinstance(value, float) and not math.isfinite(value) else value
        for name, value in values.items()
    }
    return json.dumps(finite, allow_nan=False)


def describe_start(
    device: str, ranks_per_node: Sequence[int], master: str, batch_size: int, workers: int
) -> list[str]:
    """Return the console's first lines; ``workers``: how many ranks compute."""
    ranks, nodes = sum(ranks_per_node), len(ranks_per_node)
    kind = "CPU" if device == "cpu" else "GPU"
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
    parts = [f"Epoch {row.epoch} - Avg Loss: {row.loss:.6f}", *_name_metrics(row.metrics)]
    if row.test_metrics is not None:
        parts += [f"Test {each}" for each in _name_metrics(row.test_metrics)]
        if not row.test_metrics:
            parts.append(f"Test Loss: {row.test_loss:.6f}")
    return ", ".join(parts)


def _name_metrics(metrics: Mapping[str, float]) -> list[str]:
    return [
        f"{name.replace('_', ' ').title()}: {_format(name, value)}"
        for name, value in metrics.items()
    ]


def _format(name: str, value: float) -> str:
    return f"{value:.2%}" if name in SHARES else f"{value:.6g}"


def describe_test(loss: float, metrics: Mapping[str, float]) -> str:
    """What is said last of the test samples: the task's first metric, or else the loss."""
    return next(iter(name_test_metrics(metrics)), f"test loss {loss:.6f}")


def name_test_metrics(metrics: Mapping[str, float]) -> list[str]:
    """``test accuracy 97.00%`` for each metric."""
    return [
        f"test {name.replace('_', ' ')} {_format(name, each)}" for name, each in metrics.items()
    ]


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


def describe_end(row: Row, seconds: float, directory: Path) -> str:
    """The last line; ``row``: of the last epoch, which has been evaluated."""
    assert row.test_loss is not None
    found = describe_test(row.test_loss, row.test_metrics or {})
    return (
        f"Training done: {found} after {count_noun(row.epoch, 'epoch')} in "
        f"{seconds:.1f} s (run directory {directory})"
    )

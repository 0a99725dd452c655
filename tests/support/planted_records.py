"""Records as a cluster could have written them: times of the cost model, with noise."""

import math
import random
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

import numpy

from benchmarks.records.schema import Cell, Record, make_cell, open_record
from benchmarks.records.statistics import summarize
from mpiddp.schedules.cost import Machine, MessageCost, split
from mpiddp.schedules.registry import Choice, find, parse

MACHINE = Machine(MessageCost(1e-6, 1 / 25e9), MessageCost(12e-6, 1 / 12.5e9), 1 / 20e9)
"""Nodes with a link of 100 Gbit/s."""
ALGORITHMS = ("ring", "recursive-doubling", "halving-doubling", "double-tree", "one-shot", "direct")
SIZES = tuple(1 << power for power in range(10, 27))
DENSE_SIZES = tuple(sorted({round(8 * 1.08**power) for power in range(208)}))
"""From 8 bytes to 64 MiB, so close that a break point is known to 4 %."""
HALVES = {"reduce-scatter", "all-gather", "broadcast", "reduce"}
ENVIRONMENT = {
    "date": "2026-03-02T10:00:00+00:00", "command": "python -m benchmarks allreduce",
    "python": "3.12.3", "packages": {"mpiddp": "1.0", "torch": "2.9.1"}, "commit": "0123456789ab",
    "launcher": "srun", "nodes": 2, "mpi_library": "Open MPI 5.0.8", "processor": "EPYC 9654",
    "cores": 96, "hardware_threads": 192, "memory_bytes": 768 << 30, "kernel": "Linux 6.8",
    "load_average": [0.1, 0.1, 0.1], "threads_per_process": 1, "binding": "none",
}  # fmt: skip


@dataclass(frozen=True)
class Planted:
    """What a record of collectives is to hold."""

    quantities: Sequence[str] = ("all-reduce",)
    places: Sequence[tuple[int, int]] = ((2, 1), (4, 2), (8, 2))
    """Ranks, and the nodes that they are on."""
    sizes: Sequence[int] = SIZES
    types: Sequence[str] = ("float32",)
    algorithms: Sequence[str] = ALGORITHMS
    rounds: int = 8
    factors: Mapping[str, float] = field(default_factory=dict)
    """By contender: how much longer than the model says it takes."""
    slow_rank: int | None = None
    seed: int = 1


def make_cells(planted: Planted) -> Iterator[Cell]:
    generator = random.Random(planted.seed)
    for quantity in planted.quantities:
        for ranks, nodes in planted.places:
            for contender, details, times in _list_contenders(planted, quantity, ranks, nodes):
                for kind in planted.types:
                    for size in planted.sizes:
                        seconds = times(size) * planted.factors.get(contender, 1.0)
                        at = {"bytes": size, "type": kind, "operator": "sum"}
                        if quantity in ("all-gather", "broadcast"):
                            del at["operator"]
                        yield _make_cell(
                            generator, planted, (quantity, contender, ranks, nodes), at, seconds,
                            details,
                        )  # fmt: skip


def _list_contenders(planted: Planted, quantity: str, ranks: int, nodes: int) -> Iterator[Any]:
    hosts = split(ranks, nodes)
    share = 0.5 if quantity in HALVES else 1.0

    def price(name: str) -> Any:
        prices = Choice(find(name)).prices(planted.sizes, MACHINE, hosts)
        seconds = {size: each.seconds for size, each in zip(planted.sizes, prices, strict=True)}
        return lambda size: share * seconds[size] + 2e-6

    ring, doubling = price("ring"), price("recursive-doubling")
    own = {name: price(name) for name in planted.algorithms}
    yield "Gloo", {"maker": "gloo"}, lambda size: 1.6 * ring(size) + 4e-5
    best = {"all-reduce": "MPI_Allreduce"}.get(quantity, f"MPI_{quantity.title()}")
    yield best, {"maker": "mpi"}, lambda size: min(1.2 * ring(size), 1.1 * doubling(size))
    yield "plain ring", {"maker": "ring"}, lambda size: 1.03 * ring(size)
    auto = {"maker": "mpiddp", "algorithm": "auto", "transport": "mpi", "buffer": "private"}

    def choose(size: int) -> str:
        return min(own, key=lambda name: own[name](size))

    yield "mpiddp auto, mpi, private", {**auto, "choose": choose}, lambda s: own[choose(s)](s)
    for name, times in own.items():
        yield f"mpiddp {name}, mpi, private", {**auto, "algorithm": name}, times


def _make_cell(
    generator: random.Random, planted: Planted, head: tuple[str, str, int, int],
    at: dict[str, Any], seconds: float, details: Mapping[str, Any],
) -> Cell:  # fmt: skip
    quantity, contender, ranks, nodes = head
    # A skewed noise, as machines have it: seldom quicker, sometimes much slower.
    samples = [seconds * (1 + generator.expovariate(25)) for _ in range(planted.rounds)]
    summary = summarize(samples)
    size, rate = at["bytes"], at["bytes"] / summary.median * 1e-9
    found = {key: value for key, value in details.items() if key != "choose"}
    if found["maker"] == "mpiddp":
        found["ran"] = details["choose"](size) if "choose" in details else found["algorithm"]
    if planted.slow_rank is not None and planted.slow_rank < ranks:
        found |= {"slow_rank": planted.slow_rank, "slow_rank_reason": "comes late, by 90 µs"}
    # Who comes last waits least.
    by_rank = [
        summarize([value * (0.7 if rank == found.get("slow_rank") else 1.0) for value in samples])
        for rank in range(ranks if "slow_rank" in found else 0)
    ]
    factor = {"all-reduce": 2 * (ranks - 1) / ranks}.get(quantity, (ranks - 1) / ranks)
    return Cell(
        quantity=quantity, contender=contender, ranks=ranks, nodes=nodes, at=at,
        samples=tuple(samples), summary=summary, by_rank=tuple(by_rank),
        details={**found, "algbw": rate, "busbw": rate * factor, "wrong": 0, "stopped": "interval",
                 "iterations": 10 * planted.rounds},
    )  # fmt: skip


@dataclass(frozen=True)
class Noise:
    """Of the rounds of a run, as logarithms: what each cell meets alone, and what all meet."""

    independent: float = 0.0
    """Standard deviation, of each round of each cell."""
    alike: float = 0.0
    """Standard deviation of an AR(1) process."""
    coefficient: float = 0.7
    is_shared: bool = False
    """Whether all cells meet one process and one neighbour, or each its own."""
    neighbour: float = 1.0
    """How many times slower a neighbour on the machine makes the rounds in which it is there."""
    stays: int = 5
    """For so many rounds of a run, from any round on, or it came before."""

    def draw(self, generator: numpy.random.Generator, cells: int, rounds: int) -> Any:
        """Logarithms, by cell and round."""
        found = generator.normal(0, self.independent, (cells, rounds))
        rows = 1 if self.is_shared else cells
        state = generator.normal(0, self.alike, (rows, rounds))
        for place in range(1, rounds):
            fresh = math.sqrt(1 - self.coefficient**2) * state[:, place]
            state[:, place] = self.coefficient * state[:, place - 1] + fresh
        begins = generator.integers(1 - self.stays, rounds, (rows, 1))
        places = numpy.arange(rounds)
        is_there = (begins <= places) & (places < begins + self.stays)
        return found + state + math.log(self.neighbour) * is_there


def make_pairs(
    nodes: int, slow: Mapping[tuple[int, int], float], sizes: Sequence[int] = (8, 4 << 20)
) -> Iterator[Cell]:
    """An all-pairs matrix of each size; ``slow`` has how many times longer a link takes."""
    generator = random.Random(1)
    for size in sizes:
        for start in range(nodes):
            for end in range(nodes):
                if start == end:
                    continue
                seconds = 12e-6 + size / 12.5e9 * slow.get((start, end), 1.0)
                samples = [seconds * (1 + generator.expovariate(40)) for _ in range(7)]
                yield make_cell(
                    samples, quantity="all-pairs", contender="MPI", ranks=nodes, nodes=nodes,
                    at={"bytes": size, "type": "float32", "from": start, "to": end},
                    details={"maker": "mpi", "algbw": size / seconds * 1e-9, "wrong": 0},
                )  # fmt: skip


def make_messages(
    machine: Machine = MACHINE, sizes: Sequence[int] = SIZES, noise: float | None = None
) -> Iterator[Cell]:
    """Point-to-point within a node and between two, and additions.

    ``noise``: the standard deviation of a cell's only round; by default there are eight, and the
    noise is skewed.
    """
    generator = random.Random(1)

    def make(quantity: str, size: int, seconds: float, **more: Any) -> Cell:
        if noise is None:
            samples = [seconds * (1 + generator.expovariate(60)) for _ in range(8)]
        else:
            samples = [seconds * (1 + noise * generator.gauss())]
        return make_cell(
            samples, quantity=quantity, contender="MPI_Send" if more else "NumPy",
            ranks=2 if more else 1, nodes=2 if more.get("link") == "network" else 1,
            at={"bytes": size, "type": "float32", **more},
            details={"maker": "mpi" if more else "", "wrong": 0},
        )  # fmt: skip

    for size in sizes:
        for link, cost in (("node", machine.inside), ("network", machine.between)):
            yield make("point-to-point", size, cost.seconds(size), link=link)
        if machine.addition_seconds(size):
            yield make("reduction", size, machine.addition_seconds(size))


def make_all_reduces(
    machine: Machine,
    names: Sequence[str],
    sizes: Sequence[int],
    nodes: int = 2,
    factors: Mapping[str, float] | None = None,
) -> Iterator[Cell]:
    """All-reduces of four ranks that take what is simulated, times the algorithm's factor."""
    for name in names:
        prices = parse(name).prices(sizes, machine, split(4, nodes))
        for size, price in zip(sizes, prices, strict=True):
            yield make_cell(
                [price.seconds * (factors or {}).get(name, 1.0)], quantity="all-reduce",
                contender=f"mpiddp {name}", ranks=4, nodes=nodes,
                at={"bytes": size, "type": "float32", "operator": "sum"},
                details={"algorithm": name, "ran": name, "maker": "mpiddp"},
            )  # fmt: skip


def make_record(cells: Iterable[Cell]) -> Record:
    """A complete record of these cells that is nowhere written."""
    head: dict[str, Any] = {"path": Path("record.jsonl"), "benchmark": "allreduce"}
    return Record(
        **head, environment={}, options={}, cells=tuple(cells), others=(), is_complete=True
    )


def write_record(path: Path, cells: Iterable[Cell], **environment: Any) -> Path:
    """A complete record of these cells."""
    with open_record(path, "planted", {**ENVIRONMENT, **environment}, {}) as record:
        for cell in cells:
            record.add(cell)
    return path


if __name__ == "__main__":
    write_record(
        Path(sys.argv[1]),
        chain(
            make_cells(Planted(places=((4, 2), (8, 2), (16, 4)), slow_rank=5, rounds=20)),
            make_messages(),
            make_pairs(8, {(1, 2): 1.9, (5, 0): 2.6}),
        ),
    )

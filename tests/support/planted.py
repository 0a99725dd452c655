"""Records of machines whose figures are known: planted messages, additions and collectives."""

from __future__ import annotations

import numpy as np

from benchmarks.common import records
from benchmarks.common.records import open_record
from mpiddp.schedules.cost import split
from mpiddp.schedules.registry import parse

SIZES = tuple(sorted({round(8 * 1.08**power) for power in range(208)}))
"""From 8 bytes to 64 MiB, so close that a break point is known to 4 %."""
ENVIRONMENT = {"processor": "a planted one", "usable_hardware_threads": 64}


def make_cell(quantity, seconds, *, contender="MPI_Send", ranks=2, nodes=1, details=None, **at):
    return records.make_cell(
        [float(seconds)],
        quantity=quantity,
        contender=contender,
        ranks=ranks,
        nodes=nodes,
        at={"type": "float32", **at},
        details=details or {},
    )


def plant_messages(machine, noise=0.0, seed=0, sizes=SIZES):
    """Cells of point-to-point inside and between nodes, and of additions."""
    generator = np.random.default_rng(seed)

    def spoil(seconds):
        return seconds * (1 + noise * generator.standard_normal())

    cells = []
    for size in sizes:
        for link, nodes, cost in (("node", 1, machine.inside), ("network", 2, machine.between)):
            time = spoil(cost.seconds(size))
            cells.append(make_cell("point-to-point", time, nodes=nodes, bytes=size, link=link))
        if machine.addition_seconds(size):
            time = spoil(machine.addition_seconds(size))
            cells.append(make_cell("reduction", time, ranks=1, bytes=size))
    return cells


def plant_all_reduces(machine, names, sizes, ranks=4, nodes=2, factors=None):
    """Cells of all-reduces that take what is simulated, times the algorithm's factor."""
    cells = []
    for name in names:
        prices = parse(name).prices(sizes, machine, split(ranks, nodes))
        for size, price in zip(sizes, prices, strict=True):
            time = price.seconds * (factors or {}).get(name, 1)
            details = {"algorithm": name, "ran": name, "maker": "mpiddp"}
            cells.append(
                make_cell("all-reduce", time, contender=f"mpiddp {name}", ranks=ranks, nodes=nodes,
                          details=details, bytes=size, operator="sum")
            )  # fmt: skip
    return cells


def write_cells(path, cells, environment=None):
    with open_record(path, "point-to-point", environment or ENVIRONMENT, {}) as record:
        for cell in cells:
            record.add(cell)
    return path

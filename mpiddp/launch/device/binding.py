"""Which CPUs each rank of a node runs on, if its launcher has not said so.

A rank gets cores of one NUMA node, those nearest to its GPU if it has one: its memory is near then,
and the kernel does not move it away from it. The choice is a function of what all ranks of the node
found, so that each of them makes it for itself and all come to the same.
"""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from mpiddp.process.cpus import find_cpus

AUTO, NONE, CORES, NUMA = "auto", "none", "cores", "numa"
KINDS = (AUTO, NONE, CORES, NUMA)
FEWEST_CORES = 2
"""Cores of a rank that ``auto`` binds. On a single core Gloo's threads wait for the rank that waits
for them: an all-reduce of 64 KiB takes three times as long (docs/about/performance.md)."""
SYSTEM = Path("/sys")
MOST_CPUS = 1 << 14
"""More than a kernel can have (CONFIG_NR_CPUS)."""

Cpus = frozenset[int]


@dataclass(frozen=True)
class Topology:
    """The CPUs of a machine as the kernel numbers them: hardware threads, if cores have some."""

    nodes: tuple[Cpus, ...]
    """CPUs of each NUMA node; each CPU is in one of them."""
    cores: tuple[Cpus, ...]
    """CPUs of each core; each CPU is in one of them."""


def read_topology(root: Path = SYSTEM) -> Topology:
    """What sysfs says; if it says nothing, one node, and each CPU is a core."""
    cpus = root / "devices/system/cpu"
    cores: dict[int, Cpus] = {}
    for path in cpus.glob("cpu[0-9]*"):
        number = int(path.name.removeprefix("cpu"))
        if number not in cores:
            core = read_cpus(path / "topology/thread_siblings_list") or frozenset({number})
            cores.update(dict.fromkeys(core, core))
    folders = (root / "devices/system/node").glob("node[0-9]*")
    ordered = sorted(folders, key=lambda path: int(path.name.removeprefix("node")))
    nodes = [read_cpus(path / "cpulist") & cores.keys() for path in ordered]
    rest = frozenset(cores).difference(*nodes)
    unique = dict.fromkeys(cores[number] for number in sorted(cores))
    return Topology(tuple(filter(None, (*nodes, rest))), tuple(unique))


def read_cpus(path: Path) -> Cpus:
    """The kernel's ``0-3,8,10-11`` in a file; empty if there is none."""
    numbers: set[int] = set()
    with contextlib.suppress(OSError, ValueError):
        for item in filter(None, path.read_text().strip().split(",")):
            low, _, high = item.partition("-")
            numbers.update(range(int(low), int(high or low) + 1))
    return frozenset(numbers)


def find_near_cpus(bus: str | None, root: Path = SYSTEM) -> Cpus:
    """CPUs of the NUMA node that a PCI device hangs on; empty if the system does not say."""
    return read_cpus(root / "bus/pci/devices" / bus / "local_cpulist") if bus else frozenset()


def find_allotted_cpus() -> Cpus:
    """CPUs that this process could be bound to: all of the machine, or of its control group.

    The kernel cuts a mask down to those: this thread asks for all for a moment.
    """
    before = find_cpus()
    try:
        os.sched_setaffinity(0, range(MOST_CPUS))
        return find_cpus()
    except (OSError, AttributeError):
        return before
    finally:
        with contextlib.suppress(OSError, AttributeError):
            os.sched_setaffinity(0, before)


def choose_masks(
    topology: Topology, allotted: Cpus, near: Sequence[Cpus], kind: str
) -> list[Cpus] | None:
    """The CPUs of each rank of one node, or None if they are better left alone.

    Args:
        allotted: CPUs that the ranks may use.
        near: for each rank those near its GPU; empty without a GPU.
        kind: ``cores``: each rank has separate cores; ``numa``: a NUMA node, which it may share;
            ``auto``: as ``cores``, but no rank is bound if a rank would have a single one.

    Ranks that are near to the same cores share them evenly. All others, and those that would have
    less than a core of them each, share all cores.
    """
    cores = [core & allotted for core in topology.cores if core & allotted]
    if kind == NONE or len(near) < 2 or len(near) > len(cores):
        return None
    groups: dict[Cpus, list[int]] = {}
    for rank, cpus in enumerate(near):
        groups.setdefault(cpus & allotted or allotted, []).append(rank)
    found = _share_all(topology, cores, groups, kind)
    if found is None:
        found = _share_all(topology, cores, {allotted: list(range(len(near)))}, kind)
    if found is not None and kind == AUTO:
        smallest = min(sum(core <= mask for core in cores) for mask in found)
        return found if smallest >= FEWEST_CORES else None
    return found


def _share_all(
    topology: Topology, cores: Sequence[Cpus], groups: dict[Cpus, list[int]], kind: str
) -> list[Cpus] | None:
    """Give each group of ranks its cores; None if they are too few, or overlap."""
    found: dict[int, Cpus] = {}
    if sum(map(len, groups)) > len(frozenset().union(*groups)):
        return None
    for cpus, ranks in groups.items():
        own = [core for core in cores if core <= cpus]
        if len(own) < len(ranks):
            return None
        nodes = [[core for core in own if core <= node] for node in topology.nodes]
        masks = (mask for node in _distribute(nodes, len(ranks)) for mask in _divide(*node, kind))
        found.update(zip(ranks, masks, strict=True))
    return [found[rank] for rank in sorted(found)]


def _distribute(nodes: Sequence[list[Cpus]], ranks: int) -> list[tuple[list[Cpus], int]]:
    """How many ranks each NUMA node gets, so that the smallest share is as large as can be.

    Each rank in turn goes where it has most cores (the method of D'Hondt).
    """
    counts = [0] * len(nodes)
    for _ in range(ranks):
        best = max(range(len(nodes)), key=lambda node: len(nodes[node]) / (counts[node] + 1))
        counts[best] += 1
    return [(node, count) for node, count in zip(nodes, counts, strict=True) if count]


def _divide(cores: Sequence[Cpus], ranks: int, kind: str) -> list[Cpus]:
    """The masks of ``ranks`` ranks on one NUMA node; neighbours have neighbouring cores."""
    if kind == NUMA:
        return [frozenset().union(*cores)] * ranks
    edges = [rank * len(cores) // ranks for rank in range(ranks + 1)]
    return [frozenset().union(*cores[low:high]) for low, high in itertools.pairwise(edges)]


def bind_threads(cpus: Collection[int]) -> None:
    """Let all threads of this process run on ``cpus`` alone, and those that they start."""
    for thread in os.listdir("/proc/self/task"):
        with contextlib.suppress(OSError):  # It has ended meanwhile.
            os.sched_setaffinity(int(thread), cpus)

"""The block that rank 0 prints when start-up is over."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mpiddp.launch import caches
from mpiddp.launch.device import nccl
from mpiddp.launch.device.visibility import find_module
from mpiddp.launch.launcher.hostnames import fold_hostnames
from mpiddp.launch.mpi.compatibility import library_name
from mpiddp.launch.mpi.world import World, find_oddities
from mpiddp.launch.phases import Compute, JobRanks, StartUp
from mpiddp.launch.rendezvous.route import Route
from mpiddp.launch.torch_import import PATIENCE_SECONDS
from mpiddp.process.cpus import count_shared_cores
from mpiddp.wording import count_noun, fold_numbers

if TYPE_CHECKING:
    import torch
    from mpi4py import MPI


SHOWN = 8
"""Ranks of a node whose cores are shown."""


@dataclass(frozen=True)
class NodeReport:
    """What one node's leader tells rank 0."""

    interface: str
    """The interface that carries the route to rank 0."""
    mpi_interfaces: str
    """To which MPI's TCP transports were confined; empty if they choose."""
    device: str
    """Of the leader; a node's ranks are taken to be alike."""
    cores: str
    """Of all ranks of the node."""
    remarks: tuple[str, ...]
    site_defaults: str
    """What was set for its fabric; empty if nobody has asked for it."""


def describe_device(device: torch.device, threads: int) -> str:
    """``GPU NVIDIA H200, 8 threads per rank`` or ``CPU, 2 threads per rank``."""
    name = "CPU"
    if device.type != "cpu":
        module = find_module()
        # A script's process has no context yet, and asking for the name would make one.
        name = f"GPU {module.get_device_name(device)}" if module.is_initialized() else "GPU"
    return f"{name}, {count_noun(threads, 'thread')} per rank (OMP_NUM_THREADS)"


def describe_backend(backend: str, collectives: str) -> str:
    """``nccl 2.30.7``, with the version of the library that is loaded, or ``gloo``.

    ``collectives``: whose are made where ``gloo`` is asked for.
    """
    if backend == "gloo" and collectives == "mpiddp":
        return "gloo, with mpiddp's collectives"
    version = nccl.find_version() if backend == "nccl" else ()
    return " ".join([backend, *[".".join(map(str, version))] * bool(version)])


def describe_cores(masks: Sequence[frozenset[int]], quotas: Sequence[float] = ()) -> str:
    """``0-3 | 4-7 by local rank``, or ``0-7, shared``: on which cores a node's ranks run.

    ``quotas``: the cores' worth of time that each rank found its container to have.
    """
    usable = count_shared_cores(masks, quotas)
    is_limited = usable < count_shared_cores(masks, ())
    limit = f"; time of {usable:g} of them (quota)" if is_limited else ""
    texts = [fold_numbers(mask) for mask in masks]
    if len(set(texts)) == 1:
        return texts[0] + (", shared" if len(masks) > 1 else "") + limit
    shown = texts[:SHOWN] + ["…"] * (len(texts) > SHOWN)
    return f"{' | '.join(shown)} by local rank{limit}"


def find_slowest(
    seconds: Mapping[str, float], communicator: MPI.Intracomm | None
) -> dict[str, tuple[float, int]]:
    """For each phase the longest time in seconds and the rank that took it. Collective."""
    if communicator is None:
        return {phase: (value, 0) for phase, value in seconds.items()}
    import numpy
    from mpi4py import MPI

    # MPI's DOUBLE_INT is the C struct, padding included.
    pair = numpy.dtype([("seconds", "f8"), ("rank", "i4")], align=True)
    pairs = numpy.zeros(len(seconds), dtype=pair)
    pairs["seconds"] = list(seconds.values())
    pairs["rank"] = communicator.Get_rank()
    largest = numpy.zeros_like(pairs)
    communicator.Reduce([pairs, MPI.DOUBLE_INT], [largest, MPI.DOUBLE_INT], op=MPI.MAXLOC)
    return {
        phase: (float(largest["seconds"][i]), int(largest["rank"][i]))
        for i, phase in enumerate(seconds)
    }


def describe_start(
    start_up: StartUp,
    ranks: JobRanks,
    compute: Compute,
    route: Route,
    slowest: Mapping[str, tuple[float, int]],
) -> str:
    """The start-up block, ending in a newline; empty but on rank 0. Collective.

    ``slowest``: what `find_slowest` returns. Frees the communicators of nodes and leaders.
    """
    world, roster = ranks.world, ranks.roster
    mine = NodeReport(
        interface=route.interface,
        mpi_interfaces=", ".join(ranks.mpi_interfaces),
        device=describe_device(compute.device, compute.threads),
        cores=describe_cores(
            [placement.cores for placement in compute.placements],
            [placement.quota for placement in compute.placements],
        ),
        remarks=(*compute.assignment.remarks, *_find_problems(start_up, world, compute.backend)),
        site_defaults=_describe_defaults(start_up, world),
    )
    reports = ranks.leaders.gather(mine) if ranks.leaders is not None else [mine]
    if ranks.neighbourhood is not None:
        ranks.neighbourhood.close()
    if world.rank != 0 or reports is None:
        return ""
    hostnames = ranks.hostnames
    local_sizes = roster.local_sizes if roster is not None else (world.local_size,)
    backend = describe_backend(compute.backend, start_up.options.collectives)
    rows = {
        "ranks": f"{count_noun(world.size, 'rank')} on {count_noun(world.node_count, 'node')}: "
        + fold_hostnames(hostnames),
        "ranks per node": _fold_counts(local_sizes),
        "master": f"{world.master_hostname} at {route.meeting.address}:{route.meeting.port}",
        "interface": _fold_by_node(hostnames, [report.interface for report in reports]),
        "backend": backend if start_up.makes_group else f"left to the script ({backend})",
        "devices": _fold_by_node(hostnames, [report.device for report in reports]),
        "cores": _fold_by_node(hostnames, [report.cores for report in reports]),
        "MPI": _describe_library(ranks, hostnames, reports),
        "seconds": ", ".join(_describe_phase(*item, world.size) for item in slowest.items()),
    }
    if any(report.site_defaults for report in reports):
        found = [report.site_defaults or "none" for report in reports]
        rows["site defaults"] = _fold_by_node(hostnames, found)
    if moved := caches.find_folder():
        rows["caches"] = f"{moved} on each node, as the home is shared"
    width = max(map(len, rows))
    lines = [f"  {head.ljust(width)}  {text}" for head, text in rows.items()]
    remarks = dict.fromkeys(remark for report in reports for remark in report.remarks)
    oddities = find_oddities(world, ranks.launcher, roster)
    late = describe_late_import(*slowest["import torch"], world.size)
    notes = [f"mpiddp: note: {text}" for text in (*oddities, *remarks, *late)]
    return "\n".join(["mpiddp: started", *lines, *notes]) + "\n"


def _describe_defaults(start_up: StartUp, world: World) -> str:
    defaults = start_up.site_defaults
    return defaults.describe(has_nodes=world.node_count > 1) if defaults is not None else ""


def _find_problems(start_up: StartUp, world: World, backend: str) -> tuple[str, ...]:
    """What this node's fabric needs and does not have, if NCCL is to use it; on its first rank."""
    if backend != "nccl" or world.node_count == 1 or world.local_rank != 0:
        return ()
    from mpiddp.launch import fabrics  # Jobs of one node do without.

    defaults = start_up.site_defaults
    node = defaults.node if defaults else fabrics.find_fabrics(fabrics.read_table())
    problems = [each.found for each in fabrics.find_problems(node)]
    if not problems:
        return ()
    return (f"{node.name}: {'; '.join(problems)} (python -m mpiddp doctor says what to do)",)


def describe_late_import(seconds: float, rank: int, size: int) -> list[str]:
    """That torch came late, and what helps; nothing if it did not."""
    if seconds <= PATIENCE_SECONDS:
        return []
    who = f" on rank {rank}" if size > 1 else ""
    text = (
        f"import torch took {seconds:.0f} s{who}: its thousands of files come from a slow or busy "
        "file system; stage.sh of `python -m mpiddp jobs DIR` copies them to each node's own disk"
    )
    return [text]


def _describe_library(
    ranks: JobRanks, hostnames: Sequence[str], reports: Sequence[NodeReport]
) -> str:
    if ranks.module is None:
        return "none (one process; for more: python -m mpiddp -n RANKS …)"
    library = library_name(ranks.module.Get_library_version())
    confined = [report.mpi_interfaces or "any interface" for report in reports]
    if any(report.mpi_interfaces for report in reports):
        library += f", TCP over {_fold_by_node(hostnames, confined)}"
    return library


def _describe_phase(phase: str, value: tuple[float, int], size: int) -> str:
    seconds, rank = value
    where = f" (rank {rank})" if size > 1 else ""
    return f"{phase} {seconds:.3f}{where}"


def _fold_counts(counts: Sequence[int]) -> str:
    """``8``, or ``8 on 3 nodes, 4 on 1``."""
    different = dict.fromkeys(counts)
    if len(different) == 1:
        return str(counts[0])
    return ", ".join(f"{count} on {list(counts).count(count)}" for count in different)


def _fold_by_node(hostnames: Sequence[str], values: Sequence[str]) -> str:
    """``eth0``, or ``eth0 on node[1-3]; ib0 on node4``."""
    owners: dict[str, list[str]] = {}
    for hostname, value in zip(hostnames, values, strict=True):
        owners.setdefault(value, []).append(hostname)
    if len(owners) == 1:
        return values[0]
    return "; ".join(f"{value} on {fold_hostnames(names)}" for value, names in owners.items())

"""The GPUs of all nodes, and over what NCCL connects them."""

from __future__ import annotations

import platform
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from mpiddp import environment
from mpiddp.doctor.examiner.examiner import Examiner
from mpiddp.doctor.examiner.findings import Finding
from mpiddp.doctor.gpu import gpus, nccl_log
from mpiddp.launch import phases
from mpiddp.launch.device.choice import AUTO
from mpiddp.launch.device.device import Placement
from mpiddp.launch.device.vendors import TYPES, VENDORS
from mpiddp.launch.device.visibility import find_vendor
from mpiddp.launch.network.infiniband import has_peer_memory
from mpiddp.launch.phases import Compute, StartUp

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class GpuRow:
    """Of one node."""

    findings: list[Finding] = field(default_factory=list)
    gpus: list[gpus.Gpu] = field(default_factory=list)


@dataclass(frozen=True)
class ExaminedGpus:
    """What the stage of GPUs leaves to that of NCCL."""

    compute: Compute
    recording: nccl_log.Recording | None
    """None if no rank has a GPU."""
    have_peers: bool
    """Whether the GPUs of this node can read each other's memory; on its first rank."""


def examine_gpus(examiner: Examiner) -> ExaminedGpus | None:
    """None if a rank has no device to work on. Collective."""
    ranks, world = examiner.ranks, examiner.world
    placements = examiner.attempt(gpus.GPUS, phases.find_device, ranks)
    if placements is None:
        return None
    recording = None
    if examiner.control.any(placements[world.local_rank].index is not None):
        # Before NCCL is asked anything: it reads them once.
        recording = nccl_log.Recording()
        examiner.start_up.variables.export(recording.variables)
    compute = examiner.attempt(gpus.GPUS, phases.take_device, ranks, placements)
    if compute is None:
        return None

    def examine(_: StartUp, device: torch.device) -> list[gpus.Gpu]:
        return [gpus.examine_gpu(world.rank, device)] if device.type != "cpu" else []

    own = examiner.attempt(gpus.GPUS, examine, compute.device, expected=Exception)
    if own is None:
        return None
    rows = examiner.gather_on_node(own)
    found = [gpu for row in rows or () for gpu in row]
    mine = GpuRow() if rows is None else _judge_node(examiner, placements, found)
    _judge_all(examiner, examiner.gather_nodes(mine))
    return ExaminedGpus(compute, recording, bool(found) and all(gpu.peers for gpu in found))


def _judge_node(
    examiner: Examiner, placements: Sequence[Placement], found: Sequence[gpus.Gpu]
) -> GpuRow:
    before = examiner.before
    masks = {placement.rank: placement.cores for placement in placements}
    makers = (built,) if (built := find_vendor()) is not None else VENDORS
    hidden = any(before.get(name) == "" for maker in makers for name in maker.mask_names)
    hidden |= examiner.settings.devices not in (AUTO, *TYPES)
    count = gpus.judge_count(
        examiner.world.hostname,
        placements,
        found,
        0 if hidden else gpus.count_present(),
        are_allotted=environment.is_set((environment.SLURM_JOB_ID,), before),
    )
    return GpuRow([count, gpus.judge_place(found, masks)], list(found))


def _judge_all(examiner: Examiner, nodes: Sequence[GpuRow] | None) -> None:
    if nodes is None:
        return
    found = [gpu for row in nodes for gpu in row.gpus]
    if not found:
        examiner.add_merged([row.findings[:1] for row in nodes])
        return
    examiner.add_merged([row.findings for row in nodes])
    hosts = {gpu.rank: examiner.host_of(gpu.rank) for gpu in found}
    rows = zip(examiner.hostnames, nodes, strict=True)
    without = [host for host, row in rows if not row.gpus]
    examiner.add(gpus.judge_kinds(found, hosts, without))
    examiner.add(gpus.judge_nccl(found, examiner.table.versions, platform.machine()))
    examiner.add(gpus.judge_speed(found, hosts))


def examine_transport(examiner: Examiner, examined: ExaminedGpus) -> None:
    """What NCCL has chosen, once there is a group. Collective."""
    assert examined.recording is not None
    rows = examiner.gather_on_node(examined.recording.finish())
    mine: list[Finding] = []
    if rows is not None:
        transport = nccl_log.merge_transports(rows)
        count, peers, module = examiner.world.node_count, examined.have_peers, has_peer_memory()
        mine = [nccl_log.judge_transport(transport, examiner.fabrics, count, peers, module)]
    nodes = examiner.gather_nodes(mine)
    if nodes is not None:
        examiner.add_merged(nodes)

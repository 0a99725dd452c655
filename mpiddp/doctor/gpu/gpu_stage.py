"""The GPUs of all nodes, and over what NCCL connects them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from mpiddp import environment
from mpiddp.doctor.examiner.examiner import Examiner
from mpiddp.doctor.examiner.findings import Finding
from mpiddp.doctor.gpu import gpus, nccl_log
from mpiddp.launch.device import device
from mpiddp.launch.device.choice import AUTO, CUDA
from mpiddp.launch.network.infiniband import has_peer_memory


@dataclass(frozen=True)
class GpuRow:
    findings: list[Finding] = field(default_factory=list)
    gpus: list[gpus.Gpu] = field(default_factory=list)


class GpuStage:
    """Two stages: the GPUs, and once there is a group, NCCL's transport between them."""

    def __init__(self, examiner: Examiner) -> None:
        self._examiner = examiner
        self._recording: nccl_log.Recording | None = None
        self._has_peers = False
        """Whether the GPUs of this node can read each other's memory."""

    def examine_gpus(self) -> bool:
        """Whether all ranks have devices to work on. Collective."""
        examiner, starter = self._examiner, self._examiner.starter
        if not examiner.attempt(starter.find_device, gpus.GPUS):
            return False
        if starter.control.any(starter.assignment.index is not None):
            # Before NCCL is asked anything: it reads them once.
            self._recording = nccl_log.Recording()
            starter.variables.export(self._recording.variables)
        if not examiner.attempt(starter.take_device, gpus.GPUS):
            return False
        own: list[gpus.Gpu] = []

        def examine() -> None:
            if starter.device.type == "cuda":
                own.append(gpus.examine_gpu(starter.control.world.rank, starter.device))

        if not examiner.attempt(examine, gpus.GPUS, Exception):
            return False
        rows = examiner.gather_on_node((starter.placement, own))
        mine = GpuRow()
        if rows is not None:
            mine = self._judge_node([p for p, _ in rows], [gpu for _, row in rows for gpu in row])
        self._judge_all(examiner.gather_nodes(mine))
        return True

    def _judge_node(
        self, placements: Sequence[device.Placement], found: Sequence[gpus.Gpu]
    ) -> GpuRow:
        self._has_peers = bool(found) and all(gpu.peers for gpu in found)
        before = self._examiner.before
        masks = {placement.rank: placement.cores for placement in placements}
        hidden = before.get(environment.CUDA_VISIBLE_DEVICES) == ""
        hidden |= self._examiner.settings.devices not in (AUTO, CUDA)
        count = gpus.judge_count(
            self._examiner.starter.control.world.hostname,
            placements,
            found,
            0 if hidden else gpus.count_files(),
            are_allotted=environment.is_set((environment.SLURM_JOB_ID,), before),
        )
        return GpuRow([count, gpus.judge_place(found, masks)], list(found))

    def _judge_all(self, nodes: Sequence[GpuRow] | None) -> None:
        examiner = self._examiner
        if nodes is None:
            return
        found = [gpu for row in nodes for gpu in row.gpus]
        if not found:
            examiner.add_merged([row.findings[:1] for row in nodes])
            return
        examiner.add_merged([row.findings for row in nodes])
        hosts = {gpu.rank: examiner.host_of(gpu.rank) for gpu in found}
        rows = zip(examiner.hostnames(), nodes, strict=True)
        without = [host for host, row in rows if not row.gpus]
        examiner.add(gpus.judge_kinds(found, hosts, without))
        examiner.add(gpus.judge_speed(found, hosts))

    def examine_transport(self) -> None:
        """Collective."""
        examiner = self._examiner
        assert self._recording is not None
        rows = examiner.gather_on_node(self._recording.finish())
        mine: list[Finding] = []
        if rows is not None:
            merged = nccl_log.merge_transports(rows)
            count = examiner.starter.control.world.node_count
            has_peers, has_module = self._has_peers, has_peer_memory()
            cards = nccl_log.Cards(examiner.infiniband, examiner.libfabric)
            mine = [nccl_log.judge_transport(merged, cards, count, has_peers, has_module)]
        nodes = examiner.gather_nodes(mine)
        if nodes is not None:
            examiner.add_merged(nodes)

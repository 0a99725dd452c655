"""Slurm on the cluster: what it says of its nodes, and when it is ready."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Collection, Mapping, Sequence

import machines
from state import ClusterError, Machine, Shape, directory

READY_SECONDS = 30.0
SLURMD_PORT = 6818
USABLE = ("idle", "mixed", "allocated", "completing")
DRAINED = ("drained", "draining")
QUIET = {
    # One Ethernet per node and nothing faster: looking for more would take a second per rank.
    "OMPI_MCA_pml": "ob1",
    "OMPI_MCA_btl": "^ofi,uct,openib,usnic,smcuda",
    "UCX_MEM_EVENTS": "n",
    # Nodes share this machine's cores: a rank or thread that waits must let the others run.
    "OMP_WAIT_POLICY": "PASSIVE",
    "OMPI_MCA_mpi_yield_when_idle": "1",
    "MPIDDP_WAIT": "yield",
    # Slurm asks for the munge component of PMIx, which the wheel of Open MPI lacks.
    "PMIX_MCA_psec": "native",
    # Open MPI's mpirun refuses root, who has made the cluster.
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
}
"""What ranks on this cluster should have in their environment."""


def variables() -> Mapping[str, str]:
    """What a shell must export to use the cluster."""
    return {"SLURM_CONF": f"{directory()}/slurm.conf", **QUIET}


def ask(*command: str, seconds: float = 5.0) -> str:
    """What one of Slurm's client programs prints; empty if it gets no answer in time."""
    environment = {**os.environ, **variables()}
    try:
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=seconds
        )
    except subprocess.TimeoutExpired:
        return ""
    return done.stdout if done.returncode == 0 else ""


def node_states(shape: Shape) -> dict[str, str]:
    """Slurm's word for each node: ``idle``, ``allocated``, ``down*``, …; empty without Slurm."""
    return ask_states() if machines.is_alive(shape.controller, "slurmctld") else {}


def ask_states() -> dict[str, str]:
    """The same, for users who cannot look at processes first."""
    rows = (line.split() for line in ask("sinfo", "-h", "-N", "-o", "%N %T").splitlines())
    return {row[0]: row[1] for row in rows if len(row) == 2}


def wait_until_ready(shape: Shape, nodes: Sequence[Machine]) -> list[str]:
    """Wait until each of these nodes can take a job, or is kept from it by an administrator.

    Returns the names of the latter. Raises ClusterError.
    """
    end = time.monotonic() + READY_SECONDS
    answering: set[str] = set()
    while True:
        # Slurm's own word may be as old as SlurmdTimeout.
        answering |= {node.name for node in nodes if _answers(shape, node)}
        states = node_states(shape)
        waiting = [node for node in nodes if not _is_ready(node.name, states, answering)]
        if not waiting:
            return [node.name for node in nodes if states[node.name].rstrip("*") in DRAINED]
        if time.monotonic() > end:
            found = ", ".join(f"{node.name} {states.get(node.name, 'unknown')}" for node in waiting)
            raise ClusterError(
                f"not ready after {READY_SECONDS:g} s: {found}; see {directory()}/slurmctld.log "
                f"and {directory()}/machines/{waiting[0].name}/slurmd.log"
            )
        for node in waiting:
            if states.get(node.name, "").startswith("down"):
                # It registers again, and so tells Slurm that it is back.
                machines.hang_up(node, "slurmd")
        time.sleep(0.05 if end - time.monotonic() > READY_SECONDS - 1 else 0.5)


def _is_ready(name: str, states: Mapping[str, str], answering: Collection[str]) -> bool:
    return name in answering and states.get(name) in (*USABLE, *DRAINED)


def _answers(shape: Shape, node: Machine) -> bool:
    """Whether the controller reaches a node's slurmd."""
    probe = f": </dev/tcp/{node.address}/{SLURMD_PORT}"
    command = machines.enter(shape.controller, ["timeout", "1", "bash", "-c", probe])
    return subprocess.run(command, capture_output=True).returncode == 0


def cancel_all(shape: Shape, seconds: float) -> None:
    """End all jobs as Slurm ends them, so that they clear up behind themselves."""
    if not machines.is_alive(shape.controller, "slurmctld"):
        return
    end = time.monotonic() + seconds

    def left() -> float:
        return max(0.1, end - time.monotonic())

    if not ask("squeue", "-h", "-o", "%i", seconds=left()).split():
        return
    ask("scancel", "--state=PENDING", "--state=SUSPENDED", seconds=left())
    ask("scancel", "--full", "--signal=KILL", "--state=RUNNING", seconds=left())
    while time.monotonic() < end and ask("squeue", "-h", "-o", "%i", seconds=left()).split():
        time.sleep(0.05)

"""Slurm on the cluster: what it says of its nodes, and when it is ready."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Mapping, Sequence

from state import ClusterError, Machine, directory

READY_SECONDS = 15.0
USABLE = ("idle", "mixed", "allocated", "completing")
QUIET = {
    # One Ethernet per node and nothing faster: looking for more would take a second per rank.
    "OMPI_MCA_pml": "ob1",
    "OMPI_MCA_btl": "^ofi,uct,openib,usnic,smcuda",
    "UCX_MEM_EVENTS": "n",
    # Nodes share this machine's cores: a rank that waits must let the others run.
    "OMPI_MCA_mpi_yield_when_idle": "1",
    # Slurm asks for the munge component of PMIx, which the wheel of Open MPI lacks.
    "PMIX_MCA_psec": "native",
}
"""What ranks on this cluster should have in their environment."""


def variables() -> Mapping[str, str]:
    """What a shell must export to use the cluster."""
    return {"SLURM_CONF": f"{directory()}/slurm.conf", **QUIET}


def ask(*command: str) -> str:
    """What one of Slurm's client programs prints; empty where it gets no answer."""
    environment = {**os.environ, **variables()}
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=5)
    except subprocess.TimeoutExpired:
        return ""
    return done.stdout if done.returncode == 0 else ""


def node_states() -> dict[str, str]:
    """Slurm's word for each node: ``idle``, ``allocated``, ``down*``, …"""
    rows = (line.split() for line in ask("sinfo", "-h", "-N", "-o", "%N %T").splitlines())
    return {row[0]: row[1] for row in rows if len(row) == 2}


def wait_until_ready(nodes: Sequence[Machine]) -> None:
    """Wait until all of these nodes can take a job. Raises ClusterError."""
    names = {node.name for node in nodes}
    end = time.monotonic() + READY_SECONDS
    while True:
        states = node_states()
        waiting = sorted(name for name in names if states.get(name) not in USABLE)
        if not waiting:
            return
        if time.monotonic() > end:
            found = ", ".join(f"{name} {states.get(name, 'unknown')}" for name in waiting)
            raise ClusterError(
                f"not ready after {READY_SECONDS:g} s: {found}; see {directory()}/slurmctld.log "
                f"and {directory()}/machines/{waiting[0]}/slurmd.log"
            )
        time.sleep(0.05)


def cancel_all(seconds: float) -> None:
    """End all jobs as Slurm ends them, so that they clear up behind themselves."""
    if not ask("squeue", "-h", "-o", "%i").split():
        return
    ask("scancel", "--full", "--signal=KILL", "--state=RUNNING")
    ask("scancel", "--state=PENDING", "--state=SUSPENDED")
    end = time.monotonic() + seconds
    while ask("squeue", "-h", "-o", "%i").split() and time.monotonic() < end:
        time.sleep(0.05)

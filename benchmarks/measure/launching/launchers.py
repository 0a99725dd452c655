"""The launchers that are compared: mpirun and torchrun; srun is in another module.

An mpirun's ranks all run on this machine, in an environment without variables of an earlier
launch, so that a benchmark inside a Slurm allocation measures the same as one beside it.
"""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Mapping, Sequence

from benchmarks.records.environment import ROOT, clean_environment
from mpiddp import environment
from mpiddp.launch.launcher import programs
from mpiddp.launch.network.mpi_interfaces import share_memory

BASELINES = ROOT / "benchmarks" / "measure" / "baselines"

TORCHRUN = (sys.executable, "-m", "torch.distributed.run")
TORCHRUN_PER_NODE = str(BASELINES / "srun_torchrun.sh")

TUNED = (environment.OPEN_MPI_MESSAGING, environment.UCX_MEMORY_EVENTS)
"""Settings of the table whose effect benchmarks show by themselves; binding is an option here."""


class Mpirun(programs.Mpirun):
    """An mpirun or mpiexec of the table, with what benchmarks ask of it."""

    @property
    def nodes(self) -> int | None:
        """Of a cluster: none, since all ranks are on this machine."""
        return None

    @property
    def title(self) -> str:
        return f"{self.kind.name or self.program.name} {self.version}".strip()

    @property
    def tuned(self) -> dict[str, str]:
        """Variables for ranks that are all on this machine; empty where none are known.

        Without them Open MPI looks for fast networks for a second.
        """
        if not self._is_open_mpi:
            return {}
        shared_memory = "vader" if self.kind is programs.OPEN_MPI_4 else "sm"
        # Over TCP a rank listens to every host.
        others = "" if share_memory(os.cpu_count() or 1) else ",tcp"
        tuned = {name: self.kind.local[name] for name in TUNED}
        return {**tuned, "OMPI_MCA_btl": f"self,{shared_memory}{others}"}

    @property
    def _is_open_mpi(self) -> bool:
        return self.kind in (programs.OPEN_MPI, programs.OPEN_MPI_4)

    def variables(self, ranks: int) -> dict[str, str]:
        """Variables that the ranks need, however MPI is tuned."""
        unneeded = self.kind.local if self._is_open_mpi else {}
        found = super().variables(ranks)
        return {name: value for name, value in found.items() if name not in unneeded}

    def command(self, ranks: int, program: Sequence[str] = ()) -> list[str]:
        words = super().command(ranks, program)
        return [words[0], *(["--bind-to", "none"] if self._is_open_mpi else []), *words[1:]]

    def rank_environment(self) -> dict[str, str]:
        return clean_environment(self.variables(1))

    def list_hosts(self) -> list[str]:
        return []

    def place(self, ranks: int) -> dict[str, list[int]]:
        return {socket.gethostname(): list(range(ranks))}


def find_mpirun(wanted: str | None, variables: Mapping[str, str] | None = None) -> Mpirun:
    """`programs.find_mpirun` for benchmarks, which refuse a program whose ``--version`` fails."""
    found = programs.find_mpirun(wanted, variables, must_know_version=True)
    return Mpirun(found.program, found.kind, found.version, found.library)


def choose_port() -> int:
    """A port for torchrun, which needs one.

    It is outside the range that the kernel hands out, and differs between processes that measure.
    """
    return 20000 + os.getpid() % 10000

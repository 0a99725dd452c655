"""srun as a launcher: how the cluster is found, and what a benchmark asks it for.

A benchmark calls srun where it was started: in a shell beside the cluster, where each run is a
separate job, or inside an allocation (salloc, a batch script), where each run is a step.
"""

from __future__ import annotations

import math
import os
import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.measure.launching.launchers import Mpirun
from benchmarks.records.environment import clean_environment
from mpiddp.errors import ConfigurationError

ANSWER_SECONDS = 30.0
"""How long the cluster may take to say what it is."""

USABLE = ("idle", "mixed", "allocated", "completing")

_KEPT = re.compile(r"(SLURM|SRUN|SBATCH|(OMPI|PMIX|PRTE|OPAL)_MCA|MPICH|MPIR)_.*|MPI4PY_LIBMPI")
"""What srun needs inside an allocation, where the cluster is, and how MPI is set on it."""


@dataclass(frozen=True)
class Srun:
    """An srun, and the nodes that a benchmark spreads its ranks over."""

    program: Path
    version: str
    nodes: int
    inside: bool
    """Whether runs are steps of an allocation that is there already."""

    @property
    def title(self) -> str:
        return f"Slurm {self.version}".strip()

    def command(self, ranks: int) -> tuple[str, ...]:
        """The part of the command line before a program of ``ranks`` ranks over MPI."""
        return (*self._start(ranks), "--mpi=pmix")

    def command_without_mpi(self, tasks: int, cores: int = 1) -> tuple[str, ...]:
        """The same for ``tasks`` tasks of ``cores`` cores each, that do without MPI."""
        return (*self._start(tasks), f"--cpus-per-task={cores}", "--mpi=none")

    def _start(self, tasks: int) -> tuple[str, ...]:
        return (
            str(self.program),
            "--quiet",
            "--export=ALL",
            # As with the other launchers, ranks are bound to no core.
            "--cpu-bind=none",
            f"--nodes={self.nodes}",
            f"--ntasks={tasks}",
            f"--ntasks-per-node={tasks // self.nodes}",
        )

    def environment(self, changes: Mapping[str, str] | None = None) -> dict[str, str]:
        return clean_environment(changes, kept=_KEPT)

    def rank_environment(self) -> dict[str, str]:
        return self.environment()

    def list_hosts(self) -> list[str]:
        return sorted({row[0] for row in _list_nodes(self.program)})

    def place(self, ranks: int) -> dict[str, list[int]]:
        """The ranks that a step of so many has on each node, by the node's name."""
        script = 'echo "$SLURM_PROCID $SLURMD_NODENAME"'
        program, *words = self.command_without_mpi(ranks)
        # Like every step, this one may have to wait for its nodes.
        text = _ask(Path(program), *words, "sh", "-c", script, seconds=None)
        rows = [row.split() for row in text.splitlines()]
        places: dict[str, list[int]] = {}
        for rank, name in sorted((int(rank), name) for rank, name in rows):
            places.setdefault(name, []).append(rank)
        return places


Launcher = Mpirun | Srun


def find_srun(wanted: str, nodes: int | None, ranks: Sequence[int]) -> Srun:
    """The srun to start ranks with, and over how many nodes.

    Without ``nodes`` it is the most that there are and that spread every number of ranks evenly.
    Raises ConfigurationError if there is no srun, no cluster answers, or ranks do not spread.
    """
    name = shutil.which(wanted)
    if name is None:
        raise ConfigurationError(
            f"{wanted!r} is not a program in PATH: srun comes with Slurm (package slurm-client); "
            "without a cluster, jobs/cluster/up makes one on this machine"
        )
    program = Path(name).absolute()
    version = _ask(program, "--version").split()[-1]
    held = os.environ.get("SLURM_JOB_NUM_NODES", "") if os.environ.get("SLURM_JOB_ID") else ""
    available = int(held) if held.isdecimal() else _count_nodes(program)
    chosen = nodes or _choose_nodes(available, ranks)
    if chosen > available:
        where = "the allocation has" if held else "the cluster's default partition has usable"
        raise ConfigurationError(f"--nodes {chosen}: {where} {available}")
    for count in ranks:
        if count % chosen:
            raise ConfigurationError(
                f"--ranks {count} cannot be spread evenly over {chosen} nodes: "
                "give a multiple, or other --nodes"
            )
    return Srun(program, version, chosen, bool(held))


def _choose_nodes(available: int, ranks: Sequence[int]) -> int:
    common = math.gcd(*ranks)
    return max(count for count in range(1, min(available, common) + 1) if common % count == 0)


def _list_nodes(srun: Path) -> list[list[str]]:
    """Of each node its name, state and partition. Raises ConfigurationError."""
    sinfo = srun.with_name("sinfo")
    found = shutil.which("sinfo") if not sinfo.exists() else str(sinfo)
    if found is None:
        raise ConfigurationError(f"no sinfo beside {srun} or in PATH: cannot ask for the cluster")
    rows = _ask(Path(found), "-h", "-N", "-o", "%N %T %P").splitlines()
    return [row.split() for row in rows]


def _count_nodes(srun: Path) -> int:
    """Nodes of the default partition that can take a job. Raises ConfigurationError if none."""
    rows = _list_nodes(srun)
    usable = {row[0] for row in rows if len(row) == 3 and row[1] in USABLE and row[2][-1] == "*"}
    if not usable:
        states = ", ".join(f"{row[0]} {row[1]}" for row in rows if len(row) == 3) or "none"
        raise ConfigurationError(
            f"no node of the cluster's default partition can take a job; its nodes: {states}"
        )
    return len(usable)


def _ask(program: Path, *arguments: str, seconds: float | None = ANSWER_SECONDS) -> str:
    try:
        answer = subprocess.run(
            [str(program), *arguments],
            capture_output=True,
            text=True,
            timeout=seconds,
            env=clean_environment(kept=_KEPT),
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ConfigurationError(f"no cluster answers {program.name}: {error}") from None
    if answer.returncode != 0:
        lines = (answer.stderr or answer.stdout).strip().splitlines() or ["no message"]
        raise ConfigurationError(
            f"no cluster answers {program.name} ({lines[-1]}); is SLURM_CONF set? For a cluster "
            'on this machine: jobs/cluster/up, then eval "$(jobs/cluster/env)"'
        )
    return answer.stdout

"""Start-ups of many ranks: each once under strace, which counts, and once without, which is timed.

Counting needs no change in mpiddp, and costs nobody anything who does not ask: strace looks at rank
0 from outside and sees every library's messages, those of MPI and of torch as well. It slows rank 0
down, therefore the seconds are those of other runs. While it counts, Open MPI is told to use TCP
inside of a node as well: messages in shared memory cannot be seen.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated

from benchmarks.common.checks import check_start
from benchmarks.common.options import Count, Ranks, RunOptions, Seconds
from benchmarks.common.records import Cell, make_cell
from benchmarks.common.statistics import quantile
from benchmarks.launching import processes
from benchmarks.launching.launchers import BASELINES, Mpirun, clean_environment
from benchmarks.launching.processes import Program
from benchmarks.launching.srun import Srun, is_srun
from benchmarks.startup_scale.models import Place
from benchmarks.startup_scale.stages import COUNTED, STAGES, TIMED, UNITS
from mpiddp.errors import ConfigurationError
from mpiddp.launch.launcher.command import MPICH, OPEN_MPI, OPEN_MPI_4
from mpiddp.options.checks import at_least
from mpiddp.options.fields import Argument

WRAPPER = str(BASELINES / "trace_first_rank.sh")
RANK = (sys.executable, "-m", "benchmarks.startup_scale.rank")
OVER_TCP = {"OMPI_MCA_pml": "ob1", "OMPI_MCA_btl": "self,tcp"}
"""Open MPI's variables for messages that strace sees."""
CLIQUES = "MPIR_CVAR_NUM_CLIQUES"
"""MPICH's variable: for how many nodes the ranks are taken."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What is measured, and for which size it is predicted."""

    ranks: Ranks = (2, 4, 8, 16)
    """Numbers of ranks."""
    node_counts: Annotated[tuple[int, ...], Argument("N", at_least(1), flag="--nodes")] = (1,)
    """Numbers of nodes to spread them over evenly: those of a cluster (--launcher srun), or those
    that an MPICH's mpirun takes this machine for."""
    repetitions: Count = 3
    """Starts of each kind."""
    deadline: Seconds = 300.0
    """For one start."""
    predict: Count = 65536
    """Ranks to predict for."""
    ranks_per_node: Count = 8
    """Of these."""

    @property
    def places(self) -> list[Place]:
        """Ranks and nodes that go together."""
        return [(r, n) for n in sorted(self.node_counts) for r in sorted(self.ranks) if r % n == 0]

    @property
    def predicted(self) -> Place:
        return self.predict, -(-self.predict // self.ranks_per_node)


@dataclass(frozen=True)
class Starts:
    """All starts of so many ranks on so many nodes."""

    place: Place
    samples: Mapping[tuple[str, str], tuple[float, ...]]
    """By name of stage and quantity, a value for each start."""

    def find(self, stage: str, quantity: str) -> float:
        """The median; 0 for what never occurred."""
        return quantile(self.samples.get((stage, quantity), (0.0,)), 0.5)

    def list_cells(self) -> Iterator[Cell]:
        ranks, nodes = self.place
        for stage in STAGES:
            for quantity, unit in UNITS.items():
                values = self.samples.get((stage.name, quantity))
                if values is not None:
                    yield make_cell(
                        values,
                        quantity=f"start-up {quantity}",
                        contender=stage.name,
                        ranks=ranks,
                        nodes=nodes,
                        at={"of": stage.owner},
                        unit=unit,
                    )


def find_launchers(options: RunOptions[Plan]) -> dict[int, Mpirun | Srun]:
    """The launcher for each number of nodes. Raises LaunchError and ConfigurationError."""
    plan, wanted = options.plan, options.launcher
    if not plan.places:
        counts = " ".join(map(str, plan.node_counts))
        raise ConfigurationError(f"--nodes {counts}: expected numbers that divide one of --ranks")
    found: dict[int, Mpirun | Srun] = {}
    for count in {nodes for _, nodes in plan.places}:
        ranks = [each for each, nodes in plan.places if nodes == count]
        found[count] = check_start(ranks, wanted, count if is_srun(wanted) else None)
        kind = getattr(found[count], "kind", None)
        if count > 1 and kind is not None and kind is not MPICH:
            raise ConfigurationError(
                f"--nodes {count}: expected a cluster (--launcher srun), or an MPICH's mpirun, "
                "which can take this machine for several nodes"
            )
    check_strace()
    return found


def check_strace() -> None:
    """Raise ConfigurationError unless strace can look at processes of this machine."""
    strace = shutil.which("strace")
    if strace is None:
        raise ConfigurationError("strace counts rank 0's messages and is not in PATH: install it")
    true = shutil.which("true") or "true"
    tried = subprocess.run([strace, "-qq", "-o", "/dev/null", true], capture_output=True, text=True)
    if tried.returncode != 0:
        reason = (tried.stderr.strip().splitlines() or ["no message"])[-1]
        raise ConfigurationError(
            f"strace, which counts rank 0's messages, may not look at processes here ({reason}): "
            "in a container, allow it ptrace (--cap-add SYS_PTRACE)"
        )


def list_programs(launcher: Mpirun | Srun, place: Place) -> tuple[Program, Program]:
    """The start that is counted, and the one that is timed."""
    ranks, nodes = place
    if isinstance(launcher, Srun):
        start: Sequence[str] = launcher.command(ranks)
        settle: Callable[..., dict[str, str]] = launcher.environment
        plain, counted = {}, OVER_TCP
    else:
        start, settle = launcher.command(ranks), clean_environment
        plain = {**launcher.variables(ranks), **launcher.tuned}
        if nodes > 1:
            plain[CLIQUES] = str(nodes)
        is_open_mpi = launcher.kind in (OPEN_MPI, OPEN_MPI_4)
        counted = {**plain, **(OVER_TCP if is_open_mpi else {})}
    make = partial(Program, reaches_out=True)
    return (
        make((*start, "bash", WRAPPER, *RANK), settle(counted)),
        make((*start, *RANK), settle(plain)),
    )


def measure_starts(
    launcher: Mpirun | Srun, place: Place, plan: Plan, update: Callable[[], object]
) -> Starts:
    """Start the ranks, in turns. Raises RunError if a start fails."""
    found: dict[tuple[str, str], list[float]] = {}
    for _ in range(plan.repetitions):
        pairs = zip(list_programs(launcher, place), (COUNTED, TIMED), strict=True)
        for program, quantities in pairs:
            reported = processes.run(program, plan.deadline).phases
            for stage in STAGES:
                for quantity in quantities:
                    value = reported.get(f"{stage.name}/{quantity}", 0.0)
                    found.setdefault((stage.name, quantity), []).append(value)
            update()
    occurring = {key: tuple(values) for key, values in found.items() if any(values)}
    return Starts(place, occurring)

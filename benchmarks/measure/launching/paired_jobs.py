"""Two jobs side by side for a whole measurement: one that MPI starts, and one that torchrun does.

The second one never loads MPI. On a cluster both are steps on the same nodes, and share the cores
of one allocation: while one measures, the other one sleeps.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Mapping
from typing import Any

from benchmarks.measure.launching import remote_job
from benchmarks.measure.launching.launchers import TORCHRUN, TORCHRUN_PER_NODE, choose_port
from benchmarks.measure.launching.processes import Program, make_program
from benchmarks.measure.launching.remote_job import Job
from benchmarks.measure.launching.srun import Launcher, Srun
from benchmarks.records.contenders import MPI_JOB, TORCH_JOB
from benchmarks.records.environment import clean_environment


@contextlib.contextmanager
def start_jobs(
    worker: str,
    ranks: int,
    launcher: Launcher,
    deadline: float,
    changes: Mapping[str, str] | None = None,
) -> Iterator[dict[str, Job]]:
    """Both jobs, whose ranks are ``python -m worker``; ``changes`` of their environment."""
    mpi = make_mpi_program(worker, ranks, launcher, changes)
    with remote_job.start(mpi, deadline) as first:
        torch = make_torch_program(worker, ranks, launcher, first.greeting, changes)
        with remote_job.start(torch, deadline) as second:
            yield {MPI_JOB: first, TORCH_JOB: second}
            second.end()
        first.end()


def make_mpi_program(
    worker: str, ranks: int, launcher: Launcher, changes: Mapping[str, str] | None = None
) -> Program:
    """The job that MPI starts; all that it lacks is the addresses to connect to."""
    words = (sys.executable, "-m", worker, MPI_JOB)
    if isinstance(launcher, Srun):
        command = _overlap(launcher.command(ranks))
        return Program((*command, *words), launcher.environment(changes), reaches_out=True)
    # Without the variables that tune it, Open MPI was never faster, and started later.
    return make_program(launcher, ranks, words, changes)


def make_torch_program(
    worker: str,
    ranks: int,
    launcher: Launcher,
    greeting: Mapping[str, Any],
    changes: Mapping[str, str] | None = None,
) -> Program:
    """The job that torchrun starts, on the nodes of the other one, which gave ``greeting``."""
    words = ("-m", worker, TORCH_JOB)
    if not isinstance(launcher, Srun):
        each = ("--local-addr", "127.0.0.1", "--nproc-per-node", str(ranks))
        return Program((*TORCHRUN, "--standalone", *each, *words), clean_environment(changes))
    each_node = ranks // launcher.nodes
    there = (f"--jobid={greeting['slurm_job']}", f"--nodelist={greeting['slurm_nodes']}")
    command = _overlap(launcher.command_without_mpi(launcher.nodes, cores=each_node), *there)
    settings = ("static", sys.executable, str(each_node), str(choose_port()))
    return Program(
        (*command, TORCHRUN_PER_NODE, *settings, *words),
        launcher.environment(changes),
        reaches_out=True,
    )


def _overlap(command: tuple[str, ...], *flags: str) -> tuple[str, ...]:
    return (command[0], "--overlap", *flags, *command[1:])

"""Which launcher started this process, and what it says about rank and size.

Only environment variables are read here, so it works before MPI and torch are imported. They are
read as the launcher has set them: start-up gives scripts a rank's numbers under all names.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass

from mpiddp import environment
from mpiddp.environment import LAUNCHERS, LauncherVariables
from mpiddp.errors import LaunchError
from mpiddp.launch.launcher.exported_variables import read_original
from mpiddp.launch.launcher.hostnames import expand_hostnames


@dataclass(frozen=True)
class Launcher:
    """What the launcher told this process; None if it does not say."""

    key: str
    name: str
    rank: int
    sizes: tuple[int, ...]
    """World sizes that agree with the launcher: one, none if it does not say, several for a
    heterogeneous Slurm job, where a step may span one component or all of them."""
    process_managers: frozenset[str]
    """Interfaces that it offers to an MPI library: "pmix", "pmi"."""
    is_on_one_host: bool = False
    """Whether it says that all processes are on this host."""

    @property
    def size(self) -> int | None:
        """The largest size that the launcher may mean."""
        return max(self.sizes, default=None)


def find_launcher(variables: Mapping[str, str] | None = None) -> Launcher | None:
    """The launcher that really started this process, or None if it was started by hand.

    Raises:
        LaunchError: its variables contradict each other.
    """
    variables = read_original() if variables is None else variables
    for row in LAUNCHERS:
        if not environment.is_set(row.signs, variables):
            continue
        run_id = variables.get(environment.TORCHELASTIC_RUN_ID, "")
        if row.key == "torchrun" and run_id.startswith(environment.OUR_RUN_ID_PREFIX):
            continue
        if row.key == "slurm" and _is_special_step(variables):
            continue
        return _read(row, variables)
    return None


def has_manager_hint(variables: Mapping[str, str] | None = None) -> bool:
    """Whether a process manager that the table does not know left its variables."""
    variables = read_original() if variables is None else variables
    return environment.is_set(environment.MANAGER_HINTS, variables)


def is_first(variables: Mapping[str, str] | None = None) -> bool:
    """Whether this process reports for the job while MPI is not up: the launcher's rank 0."""
    return find_rank(variables) == 0


def find_rank(variables: Mapping[str, str] | None = None) -> int:
    """This process's rank by its launcher's word; 0 without a launcher."""
    launcher = find_launcher(variables)
    return launcher.rank if launcher is not None else 0


def tasks_of_allocation(variables: Mapping[str, str] | None = None) -> int:
    """Tasks of the Slurm job around a process that no launcher started; 1 outside Slurm."""
    variables = read_original() if variables is None else variables
    return _count(variables.get(environment.SLURM_JOB_TASKS, "")) or 1


def hosts_of_step(variables: Mapping[str, str] = os.environ) -> tuple[str, ...]:
    """Hosts on which the launcher started this job; empty if it does not say."""
    try:
        return expand_hostnames(variables.get(environment.SLURM_STEP_NODES, ""))
    except ValueError:
        return ()


def _read(row: LauncherVariables, variables: Mapping[str, str]) -> Launcher:
    rank = _integer(row, row.rank, variables)
    if rank is None:
        raise LaunchError(
            f"{row.name} started this process but {row.rank} is not set: "
            "start the job again from a shell without variables of an earlier launch"
        )
    size = _integer(row, row.size, variables)
    sizes: tuple[int, ...] = () if size is None else (size,)
    if row.key == "slurm":
        sizes += _heterogeneous_sizes(variables)
    if rank < 0 or (sizes and rank >= max(sizes)):
        of = f" of {max(sizes)} ({row.size})" if sizes else ""
        raise LaunchError(
            f"{row.name} says rank {rank} ({row.rank}){of}, which cannot be: "
            "start the job again from a shell without variables of an earlier launch"
        )
    on_this_host = _integer(row, row.local_size, variables)
    if row.key == "slurm" and len(hosts_of_step(variables)) == 1:
        on_this_host = size
    return Launcher(
        key=row.key,
        name=row.name,
        rank=rank,
        sizes=sizes,
        process_managers=_process_managers(row, variables),
        is_on_one_host=set(sizes) == {on_this_host},
    )


def _integer(row: LauncherVariables, name: str | None, variables: Mapping[str, str]) -> int | None:
    text = variables.get(name, "") if name else ""
    if not text:
        return None
    try:
        return int(text)
    except ValueError:
        raise LaunchError(
            f"{row.name} sets {name} to a whole number, but it holds {text[:40]!r}"
        ) from None


def _is_special_step(variables: Mapping[str, str]) -> bool:
    """Whether this is a batch script or an interactive shell, which are steps of one task too."""
    steps = (_count(variables.get(name, "")) for name in environment.SLURM_STEP_IDS)
    return any(step is not None and step >= environment.SLURM_FIRST_SPECIAL_STEP for step in steps)


def _heterogeneous_sizes(variables: Mapping[str, str]) -> tuple[int, ...]:
    components = _count(variables.get(environment.SLURM_HETEROGENEOUS_SIZE, "")) or 0
    total = 0
    for index in range(components):
        count = _count(variables.get(f"{environment.SLURM_HETEROGENEOUS_TASKS}{index}", ""))
        if count is None:
            return ()
        total += count
    return (total,) if components else ()


def _count(text: str) -> int | None:
    """A number as Slurm writes it, in ASCII digits; None for anything else."""
    return int(text) if text.isascii() and text.isdigit() else None


def _process_managers(row: LauncherVariables, variables: Mapping[str, str]) -> frozenset[str]:
    if row.key == "hydra":
        return frozenset({"pmi"})
    if row.key in ("openmpi", "prrte"):
        return frozenset({"pmix"})
    return frozenset(
        manager
        for manager, signs in environment.MANAGER_SIGNS.items()
        if environment.is_set(signs, variables)
        and not (row.key == "slurm" and _is_of_another_step(manager, variables))
    )


def _is_of_another_step(manager: str, variables: Mapping[str, str]) -> bool:
    """Whether a process manager serves the step in which this one was started, and not this one."""
    text = variables.get(environment.SLURM_MANAGER_STEP[manager], "")
    served = re.fullmatch(r"(?:slurm\.pmix\.)?(\d+)\.(\d+)", text)
    if served is None:
        return False
    steps = [variables.get(name) for name in environment.SLURM_STEP_IDS]
    is_of_job = (
        served[1] == variables.get(environment.SLURM_JOB_ID)
        or environment.SLURM_HETEROGENEOUS_SIZE in variables  # Each component has a number.
    )
    return not (is_of_job and served[2] in steps)

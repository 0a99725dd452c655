"""Hosts that a scheduler other than Slurm has given this job, or somebody has named in a variable.

One table: which variable, in which form. The forms are those of the schedulers' own documents: PBS
writes a host for each rank (man qsub, PBS_NODEFILE), LSF as well, or a host and its number by turns
(LSF Configuration Reference, LSB_DJOB_HOSTFILE, LSB_MCPU_HOSTS), Grid Engine a host, its slots, a
queue and processors (man sge_pe, pe_hostfile), Cobalt and OAR a host a line. Kubernetes' MPI
Operator writes a file and names it in the variable of each MPI's launcher.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from mpiddp import environment
from mpiddp.errors import ConfigurationError
from mpiddp.launch.launcher.host_list import Host, HostList, join, read_lines, read_pairs


@dataclass(frozen=True)
class HostSource:
    """One row of the table."""

    name: str
    """The scheduler or setting, for messages."""
    variable: str
    read: Callable[[str], tuple[Host, ...]] = read_lines
    is_file: bool = True
    """Whether the variable names a file."""
    is_setting: bool = False
    """Whether it may be a user's or administrator's, and the file none, or without a host."""
    agent: tuple[str, ...] = ()
    """What reaches a host in its jobs, in place of ssh, if there is such a program."""
    is_agent_known: bool = False
    """Whether launchers take that by themselves."""


SOURCES = (
    HostSource("PBS", environment.PBS_NODE_FILE),
    HostSource("LSF", environment.LSF_HOST_FILE, agent=("blaunch",)),
    HostSource("LSF", environment.LSF_HOSTS, read_pairs, is_file=False, agent=("blaunch",)),
    HostSource(
        "Grid Engine",
        environment.GRID_ENGINE_HOST_FILE,
        agent=("qrsh", "-inherit"),
        is_agent_known=True,
    ),
    HostSource("Cobalt", environment.COBALT_NODE_FILE),
    HostSource("OAR", environment.OAR_NODE_FILE, agent=("oarsh",)),
    *(
        HostSource(name, each, is_setting=True)
        for name, variables in (
            ("Open MPI's default host file", environment.OPEN_MPI_HOST_FILES),
            ("Hydra's host file", environment.HYDRA_HOST_FILES),
        )
        for each in variables
    ),
)


REQUEUE_CODES = (
    ("Grid Engine", environment.GRID_ENGINE_TASK, 99),
    ("OAR", environment.OAR_NODE_FILE, 99),
)
"""Schedulers that start a job again after an exit code, by a variable that its jobs have: Grid
Engine (man sge_conf, FORBID_RESCHEDULE) and OAR (oar.imag.fr, FAQ, for jobs of type idempotent)."""


def find_requeue_code(variables: Mapping[str, str] = os.environ) -> tuple[str, int] | None:
    """This job's scheduler and the exit code after which it starts the job again, if one does."""
    return next(((who, code) for who, sign, code in REQUEUE_CODES if variables.get(sign)), None)


def find_source(variables: Mapping[str, str] = os.environ) -> HostSource | None:
    """Who has given this process's job its hosts; None if nobody says."""
    return next((each for each in SOURCES if variables.get(each.variable)), None)


def find_hosts(variables: Mapping[str, str] = os.environ) -> HostList | None:
    """The hosts that this process's job has been given; None if nobody says.

    Raises ConfigurationError if the list cannot be read.
    """
    source = find_source(variables)
    if source is None:
        return None
    value = variables[source.variable]
    if source.is_setting and (value == "none" or _is_blank(Path(value))):
        return None
    if source.is_file:
        return HostList(read_file(Path(value), source.variable, each=1), source.name, is_firm=False)
    try:
        return HostList(join(source.read(value), each=1), source.name, is_firm=False)
    except ValueError as error:
        raise ConfigurationError(f"{source.variable}: {error}") from None


def _is_blank(path: Path) -> bool:
    """Whether a file has comments at most, as Open MPI's own default host file."""
    with contextlib.suppress(OSError):
        lines = path.read_text(errors="replace").splitlines()
        return not any(line.partition("#")[0].strip() for line in lines)
    return False


def read_file(path: Path, what: str, *, each: int | None = None) -> tuple[Host, ...]:
    """The hosts of a file that ``what`` names; see `join`. Raises ConfigurationError."""
    try:
        return join(read_lines(path.read_text(errors="replace")), each=each)
    except OSError as error:
        raise ConfigurationError(f"{what}: {path} cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise ConfigurationError(f"{what}: {path}: {error}") from None

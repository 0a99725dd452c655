"""The front's options: how the ranks of a job are started."""

from __future__ import annotations

import math
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from mpiddp.errors import ConfigurationError
from mpiddp.launch.launcher.host_list import HostList, read_hosts
from mpiddp.launch.options import SECONDS
from mpiddp.options.checks import at_least, check, quote
from mpiddp.options.fields import Argument

NONE = "none"
"""In place of a launcher, for a program that starts its ranks itself."""
AUTO = "auto"
MOST = 10**9
"""More than any cluster has: a slip."""
COUNT = Argument("N", at_least(1, MOST))


def _read_ranks(text: str) -> int | None:
    """A number of ranks, or ``auto``."""
    if text == AUTO:
        return None
    try:
        return at_least(1, MOST)(text)
    except ValueError:
        expected = f"auto or an integer from 1 to {MOST}"
        raise ValueError(f"expected {expected}, found {quote(text)}") from None


@dataclass(frozen=True, kw_only=True)
class LayoutRequest:
    """How many ranks the front was asked for; None if it was not said."""

    ranks: Annotated[int | None, Argument("N", _read_ranks, flag="-n")] = None
    """Ranks; or auto, the default in a scheduler's job and beside other options of this group: one
    per GPU, else one per core; in a Slurm job as many tasks as it has, else one per GPU, else one
    per node; of a list of hosts as many as it says."""

    nodes: Annotated[int | None, COUNT] = None
    """Nodes of the scheduler's job, or hosts, to use (default: all)."""

    ranks_per_node: Annotated[int | None, COUNT] = None
    """On each of these nodes or hosts."""

    hosts: Annotated[HostList | None, Argument("HOST:N,…", read_hosts)] = None
    """Machines to start ranks on, over SSH, with N ranks each, as a:4,b:4 or node[1-3]:2 (default
    for N: one per GPU, else one per core)."""

    hostfile: Path | None = None
    """The same from a file: a line for each, as a:4 or a slots=4."""

    @property
    def is_empty(self) -> bool:
        return (self.ranks, self.nodes, self.ranks_per_node) == (None, None, None)


@dataclass(frozen=True, kw_only=True)
class FrontOptions(LayoutRequest):
    """How ranks are started, in a shell or a batch script."""

    launcher: Annotated[str, Argument("NAME")] = AUTO
    """auto (the default), mpirun, mpiexec, srun, a program, or none for a program that starts ranks
    itself; auto is srun in a Slurm job."""

    launcher_options: Annotated[str, Argument("TEXT")] = ""
    """More options for it, quoted as in a shell."""

    dry_run: bool = False
    """Print the command line instead of running it."""

    preflight: bool = False
    """Examine all nodes before the ranks start, some seconds long, and leave out those that
    fail."""

    restarts: Annotated[int, Argument("N", at_least(0, MOST))] = 0
    """How often all ranks are started again after a failure."""

    restart_window: Annotated[float | None, SECONDS] = None
    """Count from 0 again after a longer attempt (default: never)."""

    min_nodes: Annotated[int | None, COUNT] = None
    """Do not start on fewer nodes or hosts (default: 1, and at first as many as were chosen)."""

    requeue: bool = False
    """Have Slurm requeue the batch job after exit code 75."""

    job_log: Annotated[Path | None, Argument("DIR")] = None
    """Write all ranks' output to DIR/NAME-JOB.out and .err, and tell what is started and how it
    ends."""

    version: bool = False
    """Print the version of mpiddp."""

    python: Annotated[str | None, Argument("PROGRAM", is_hidden=True)] = None
    """What runs each rank in place of this Python; of the job scripts."""

    @property
    def fewest_nodes(self) -> int:
        return self.min_nodes or 1

    def __post_init__(self) -> None:
        check("launcher", self.launcher != "", "the name of a launcher", self.launcher)
        split_words("--launcher-options", self.launcher_options)
        if self.hosts is not None and self.hostfile is not None:
            raise ConfigurationError("--hosts and --hostfile both name machines: give one of them")
        seconds = self.restart_window
        good = seconds is None or (seconds >= 0 and math.isfinite(seconds))
        check("restart_window", good, "0 or more seconds", seconds)


def split_words(name: str, text: str) -> tuple[str, ...]:
    """The words of ``text``, as a shell cuts it. Raises ConfigurationError that says ``name``."""
    try:
        return tuple(shlex.split(text))
    except ValueError as error:
        raise ConfigurationError(f"{name} cannot be split into words ({error}): {text}") from None

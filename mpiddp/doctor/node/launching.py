"""Whether the launch itself is right: MPI and its launcher, ranks and nodes, lost ranks."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence

from mpiddp import environment
from mpiddp.doctor.examiner.findings import Finding, describe_range, failed, passed, skipped, warned
from mpiddp.errors import ConfigurationError, LaunchError
from mpiddp.front.allocation import ask
from mpiddp.launch.launcher.hostnames import fold_hostnames
from mpiddp.launch.launcher.launcher import Launcher
from mpiddp.launch.launcher.programs import SRUN, find_mpirun, find_program
from mpiddp.launch.mpi import mpi
from mpiddp.launch.mpi.compatibility import library_name
from mpiddp.launch.mpi.world import Roster, World
from mpiddp.wording import count_noun

MPI_LIBRARY = "MPI library"
HOSTS = "hosts"
RANKS = "ranks"
KILL_ON_BAD_EXIT = "kill on bad exit"
SLURM_SECONDS = 1.0
"""How long Slurm may take to show its configuration."""


def find_mpi(variables: Mapping[str, str]) -> str:
    """What keeps one process from starting several; empty if nothing does."""
    try:
        mpi.load(None)
        if find_program(SRUN.program) is None:
            find_mpirun(None, variables)
    except (LaunchError, ConfigurationError) as error:
        return str(error)
    return ""


def judge_library(version: str | None, launcher: Launcher | None, missing: str = "") -> Finding:
    """The library and the launcher that started it; a pair that does not fit never gets here.

    ``missing``: what keeps one process from starting more.
    """
    if version is None and missing:
        found = f"one process, which needs none; several cannot be started: {missing}"
        return failed(MPI_LIBRARY, found, code=LaunchError.exit_code)
    if version is None:
        return skipped(MPI_LIBRARY, "one process, which needs none")
    starter = launcher.name if launcher is not None else "no launcher that mpiddp knows"
    managers = " and ".join(sorted(launcher.process_managers)) if launcher is not None else ""
    offers = f" ({managers})" if managers else ""
    return passed(MPI_LIBRARY, f"{library_name(version)}, started by {starter}{offers}")


def judge_hosts(text: str) -> Finding:
    """What the front has found before it started ranks over SSH (`environment.ASKED_HOSTS`)."""
    answers = json.loads(text)
    if answers["problems"]:
        return failed(HOSTS, answers["problems"], code=ConfigurationError.exit_code)
    return passed(
        HOSTS,
        f"{count_noun(answers['asked'], 'host')} reached over SSH, with the same Python, mpiddp, "
        "torch, mpi4py and numpy, and the next one reached from each",
    )


def judge_ranks(
    world: World,
    roster: Roster | None,
    oddities: Sequence[str],
    strangers: Mapping[str, Sequence[str]],
) -> Finding:
    """Ranks and nodes as MPI splits them, against the launcher and the hosts' names.

    ``strangers``: for a node, by its leader's host name, the other names on it.
    """
    hostnames = roster.hostnames if roster is not None else (world.hostname,)
    per_node = describe_range(roster.local_sizes if roster is not None else [world.local_size])
    ranks, nodes = count_noun(world.size, "rank"), count_noun(world.node_count, "node")
    found = f"{ranks} on {nodes} ({fold_hostnames(hostnames)}), {per_node} per node"
    problems = list(oddities)
    for leader, names in strangers.items():
        problems.append(
            f"ranks on {fold_hostnames(names)} share their memory with {leader}, "
            "but have another host name"
        )
    if not problems:
        return passed(RANKS, found)
    return warned(RANKS, f"{found}; " + "; ".join(problems), "Look at how the job was started")


def find_slurm_setting() -> str | None:
    """KillOnBadExit of this cluster's configuration, or None if Slurm does not tell."""
    try:
        said = ask("scontrol", "show", "config", seconds=SLURM_SECONDS)
    except ConfigurationError:
        return None
    match = re.search(r"^KillOnBadExit\s*=\s*(\S+)", said, re.MULTILINE)
    return match[1] if match else None


def judge_kill_on_bad_exit(
    launcher: Launcher | None, setting: str | None, variables: Mapping[str, str] = os.environ
) -> Finding:
    """Whether the job ends when a rank is killed by a signal.

    Failures in Python end the job without it: only a killed rank cannot tell the others.
    """
    if launcher is None:
        return skipped(KILL_ON_BAD_EXIT, "no launcher")
    if launcher.key != "slurm":
        return passed(KILL_ON_BAD_EXIT, f"{launcher.name} ends the job when a rank is killed")
    asked = variables.get(environment.SLURM_KILL_BAD_EXIT)
    if asked is not None:
        if asked.strip() not in ("", "0"):
            return passed(KILL_ON_BAD_EXIT, f"on ({environment.SLURM_KILL_BAD_EXIT})")
        return warned(
            KILL_ON_BAD_EXIT,
            f"off ({environment.SLURM_KILL_BAD_EXIT}=0): a rank killed by a signal leaves the "
            "others waiting for their time-out",
            "srun --kill-on-bad-exit=1",
        )
    if setting not in (None, "0"):
        return passed(KILL_ON_BAD_EXIT, "on (KillOnBadExit in Slurm's configuration)")
    return skipped(
        KILL_ON_BAD_EXIT,
        "srun's option cannot be seen from a rank; only a rank killed by a signal needs it: "
        "srun --kill-on-bad-exit=1",
    )

"""What several commands refuse before anything is measured."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from benchmarks.measure.launching.launchers import Mpirun, find_mpirun
from benchmarks.measure.launching.srun import Launcher, Srun, find_srun
from benchmarks.records.options import RunOptions, is_srun
from mpiddp.errors import ConfigurationError, LaunchError
from mpiddp.launch.launcher.launcher import find_launcher
from mpiddp.options.outputs import check_outputs


def check_run(options: RunOptions[Any], ranks: Sequence[int], *, link: bool = False) -> Launcher:
    """Refuse what cannot be written or started; returns the launcher to use.

    ``link``: a link between two nodes is to be timed. Raises LaunchError and ConfigurationError.
    """
    check_outputs(options.output)
    found = check_start(ranks, options.launcher, options.nodes)
    if link and (not isinstance(found, Srun) or found.nodes < 2):
        raise ConfigurationError("--link needs two nodes of a cluster: --launcher srun --nodes 2")
    return found


def check_local_run(options: RunOptions[Any], *ranks: int) -> Mpirun:
    """As ``check_run``, where all ranks are on this machine."""
    found = check_run(options, ranks)
    if not isinstance(found, Mpirun):
        raise ConfigurationError("--launcher: expected an mpirun, found srun: runs are on one node")
    return found


def check_start(ranks: Sequence[int], wanted: str | None, nodes: int | None) -> Launcher:
    """The launcher to use. Raises LaunchError and ConfigurationError."""
    launcher = find_launcher()
    # A step of one task holds its allocation's cores: a step inside would wait for it.
    fewest = 1 if is_srun(wanted) else 2
    if launcher is not None and (launcher.size or 1) >= fewest:
        count = launcher.size or "several"
        raise LaunchError(
            f"{launcher.name} started {'one process' if count == 1 else f'{count} processes'} of "
            "this benchmark, which starts its ranks itself: run it without a launcher"
        )
    if wanted is not None and is_srun(wanted):
        return find_srun(wanted, nodes, ranks)
    if nodes is not None:
        raise ConfigurationError("--nodes needs a cluster: --launcher srun")
    return find_mpirun(wanted)

"""What several commands refuse before anything is measured."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from benchmarks.measure.launching.launchers import find_mpirun
from benchmarks.measure.launching.srun import Launcher, find_srun
from benchmarks.records.options import RunOptions, is_srun
from mpiddp.errors import ConfigurationError, LaunchError
from mpiddp.launch.launcher.launcher import find_launcher
from mpiddp.options.outputs import check_outputs

NO_LINK = "--link needs two nodes of a cluster: --launcher srun --nodes 2"


def check_run(options: RunOptions[Any], ranks: Sequence[int], *, link: bool = False) -> Launcher:
    """Refuse what cannot be written or started; returns the launcher to use.

    ``link``: a link between two nodes is to be timed. Raises LaunchError and ConfigurationError.
    """
    check_outputs(options.output)
    outer = find_launcher()
    # A step of one task holds its allocation's cores: a step inside would wait for it.
    fewest = 1 if is_srun(options.launcher) else 2
    if outer is not None and (outer.size or 1) >= fewest:
        count = outer.size or "several"
        raise LaunchError(
            f"{outer.name} started {'one process' if count == 1 else f'{count} processes'} of "
            "this benchmark, which starts its ranks itself: run it without a launcher"
        )
    if options.launcher is not None and is_srun(options.launcher):
        found = find_srun(options.launcher, options.nodes, ranks)
        if link and found.nodes < 2:
            raise ConfigurationError(NO_LINK)
        return found
    if options.nodes is not None:
        raise ConfigurationError("--nodes needs a cluster: --launcher srun")
    if link:
        raise ConfigurationError(NO_LINK)
    return find_mpirun(options.launcher)

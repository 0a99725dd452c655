"""Whether the ranks of a script have had anything to do with each other.

A script that joins no group trains once on each rank, and ends well: every rank believes that it is
alone. What is seen here costs nothing while the script runs. Rather no hint than a wrong one.
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
from collections.abc import Callable

from mpiddp.launch.mpi.control import count_exchanges
from mpiddp.launch.session import Session
from mpiddp.lifeline.stacks.flight_recorder import read_calls
from mpiddp.options.reader import HELP

KNOWS_RANKS = re.compile(rb"\b(mpi4py|mpiddp|RANK|SLURM_PROCID|\w+_WORLD_RANK|PMIX?_RANK)\b")
"""In a file of a script that has to do with ranks in a way that leaves no trace."""
OWN = re.compile(r"(mpiddp|mpi4py)(\.|$)")
"""Names of modules that are there anyway."""


def watch(session: Session) -> Callable[[], bool]:
    """What tells, at the end of the script, whether the ranks never talked to each other.

    Only on rank 0, whose store all groups of torch.distributed meet in; False on the others.
    """
    if session.world.rank != 0 or session.world.size == 1:
        return lambda: False
    before = _count(session)

    def is_silent() -> bool:
        with contextlib.suppress(Exception):  # A hint must not fail a job.
            if HELP.isdisjoint(sys.argv[1:]) and _count(session) == before and not read_calls():
                modules = list(sys.modules.items())
                return not any(_knows_ranks(*each) for each in modules if not OWN.match(each[0]))
        return False

    return is_silent


def _count(session: Session) -> tuple[int, ...]:
    return (session.store.num_keys(), *count_exchanges(session), *session.count_calls())


def _knows_ranks(name: str, module: object) -> bool:
    """Whether it has imported MPI, or it is the script's own and names ranks in its text."""
    if getattr(module, "__dict__", {}).get("MPI") is sys.modules.get("mpi4py.MPI", module):
        return True
    path = getattr(module, "__file__", None) or ""
    package = (sys.modules["__main__"].__package__ or "__main__").partition(".")[0]
    is_own = name.partition(".")[0] in ("__main__", package)
    is_installed = path.startswith((sys.prefix, sys.base_prefix))
    if not os.path.isabs(path) or (is_installed and not is_own):
        return False
    try:
        with open(path, "rb") as file:
            return KNOWS_RANKS.search(file.read()) is not None
    except OSError:  # In an archive.
        return True


def describe(ranks: int) -> str:
    """One line for the user."""
    return (
        f"mpiddp: hint: the {ranks} ranks never talked to each other, so each did all of the "
        "script's work by itself. To share it, call torch.distributed.init_process_group() and "
        "wrap the model in DistributedDataParallel, or read RANK; else leave -n out\n"
    )

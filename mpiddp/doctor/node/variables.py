"""Environment variables that change what MPI, NCCL and Gloo do: by name, rarely by value."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from mpiddp import environment
from mpiddp.doctor.examiner.findings import Finding, passed, warned
from mpiddp.launch.launcher.hostnames import fold_hostnames

VARIABLES = "variables"

Row = tuple[tuple[str, str | None], ...]
"""Names of variables, with the values of the harmless ones."""

MATTERS = re.compile(
    r"(NCCL|GLOO|TORCH_NCCL|OMPI_MCA|PRTE_MCA|PMIX_MCA|UCX|FI|MPICH|MPIR_CVAR|I_MPI|KMP|GOMP)_\w+"
    r"|OMP_(NUM_THREADS|PROC_BIND|PLACES)|CUDA_(VISIBLE_DEVICES|LAUNCH_BLOCKING|DEVICE_ORDER)"
    r"|LD_PRELOAD|MASTER_(ADDR|PORT)|MPI4PY_\w+|MIOPEN_\w+"
    r"|(HIP|ROCR)_VISIBLE_DEVICES|GPU_DEVICE_ORDINAL|ONEAPI_DEVICE_SELECTOR|ZE_\w+|CCL_\w+"
)
"""Names of variables that may explain what a launch does."""


def find_variables(variables: Mapping[str, str]) -> Row:
    """Variables that matter on this node: all names, and the values of the harmless ones alone."""
    return tuple(
        (name, value if name in environment.HARMLESS else None)
        for name, value in sorted(variables.items())
        if MATTERS.fullmatch(name) and not name.startswith(environment.FROM_LAUNCHER)
    )


def judge_variables(
    hostnames: Sequence[str], rows: Sequence[Row], infiniband: Sequence[str]
) -> Finding:
    """What is set, from every node; differences between nodes are pointed out.

    ``infiniband``: devices of rank 0's node.
    """
    shown = ", ".join(name if value is None else f"{name}={value}" for name, value in rows[0])
    found = shown or "none of those that matter is set"
    differing = [
        name for name, row in zip(hostnames, rows, strict=True) if _alike(row) != _alike(rows[0])
    ]
    problems = []
    if differing:
        names = sorted(
            {name for row in rows for name, _ in set(_alike(row)) ^ set(_alike(rows[0]))}
        )
        problems.append(f"{', '.join(names)} differs on {fold_hostnames(differing)}")
    if infiniband and dict(rows[0]).get(environment.NCCL_IB_DISABLE) not in (None, "", "0"):
        problems.append(f"{environment.NCCL_IB_DISABLE} turns {', '.join(infiniband)} off")
    if not problems:
        return passed(VARIABLES, found)
    return warned(
        VARIABLES,
        f"{'; '.join(problems)}; set on {hostnames[0]}: {found}",
        "Set the same everywhere, in the job script and not in a profile of one node",
    )


def _alike(row: Row) -> Row:
    """What should be the same everywhere: interfaces and devices have other names elsewhere."""
    return tuple(item for item in row if item[0] not in environment.DIFFERS_BY_NODE)

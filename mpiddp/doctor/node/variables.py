"""Environment variables that change what MPI, NCCL and Gloo do, and those that a fabric needs."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from mpiddp import environment
from mpiddp.doctor.examiner.findings import Finding, passed, skipped, warned
from mpiddp.launch.fabrics import NodeFabrics, find_problems
from mpiddp.launch.launcher.hostnames import fold_hostnames

FABRIC = "fabric"
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


def judge_fabric(node: NodeFabrics, variables: Mapping[str, str], node_count: int) -> Finding:
    """What is missing for NCCL and MPI to use a node's fabric, or set against it."""
    problems = list(find_problems(node, variables, has_nodes=node_count > 1))
    if problems:
        advice = "; ".join(each.advice for each in problems)
        return warned(
            FABRIC,
            f"{node.name}: {'; '.join(each.found for each in problems)}",
            advice[:1].upper() + advice[1:],
        )
    if not node.fabrics:
        return skipped(FABRIC, "no fast network card that is known: TCP between nodes")
    by = f", by {node.library}" if node.library is not None else ""
    return passed(FABRIC, f"{node.name}{by}: nothing is missing")


def judge_variables(hostnames: Sequence[str], rows: Sequence[Row]) -> Finding:
    """What is set, from every node; differences between nodes are pointed out."""
    shown = ", ".join(name if value is None else f"{name}={value}" for name, value in rows[0])
    found = shown or "none of those that matter is set"
    differing = [
        name for name, row in zip(hostnames, rows, strict=True) if _alike(row) != _alike(rows[0])
    ]
    if not differing:
        return passed(VARIABLES, found)
    names = sorted({name for row in rows for name, _ in set(_alike(row)) ^ set(_alike(rows[0]))})
    return warned(
        VARIABLES,
        f"{', '.join(names)} differs on {fold_hostnames(differing)}; "
        f"set on {hostnames[0]}: {found}",
        "Set the same everywhere, in the job script and not in a profile of one node",
    )


def _alike(row: Row) -> Row:
    """What should be the same everywhere: interfaces and devices have other names elsewhere."""
    return tuple(item for item in row if item[0] not in environment.DIFFERS_BY_NODE)

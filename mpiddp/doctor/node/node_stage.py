"""What each node sees by itself: name, cores, limits, directories, variables."""

from __future__ import annotations

import functools
import os
from dataclasses import dataclass

from mpiddp import environment
from mpiddp.doctor.examiner.examiner import Examiner
from mpiddp.doctor.examiner.findings import Finding
from mpiddp.doctor.network import name_resolution
from mpiddp.doctor.node import cores, directories, leftovers, limits, variables
from mpiddp.process.background import BackgroundCall
from mpiddp.process.cpus import find_cpus, find_quota


@dataclass(frozen=True)
class NodeRow:
    findings: list[Finding]
    data: directories.DirectoryFacts | None
    variables: variables.Row


def examine_nodes(examiner: Examiner) -> None:
    """Collective."""
    settings, control = examiner.settings, examiner.control
    token: directories.Token | None = None
    content, problem = "", ""
    if examiner.world.rank == 0:
        content = os.urandom(8).hex()
        token, problem = directories.put_token(settings.runs_dir, content)
    content, problem = control.broadcast((content if token else "", problem))
    try:
        rows = _gather_rows(examiner, content, problem)
    finally:
        if token is not None:
            token.remove()
    if rows is None:
        return
    examiner.add_merged([row.findings for row in rows])
    first = rows[0].data
    examiner.add_merged(
        [[directories.judge_data(settings.data_dir, row.data, first)] for row in rows]
    )
    every = [row.variables for row in rows]
    examiner.add(variables.judge_variables(examiner.hostnames, every))


def _gather_rows(examiner: Examiner, token: str, problem: str) -> list[NodeRow] | None:
    """Every node's part, on rank 0. ``token``: what rank 0 has put into the run directory; empty if
    it could not, because of ``problem``.
    """
    world, settings = examiner.world, examiner.settings
    resolution = BackgroundCall(functools.partial(name_resolution.resolve, world.hostname))
    threads = examiner.before.get(environment.OMP_NUM_THREADS)
    bindings = examiner.gather_on_node(
        cores.RankCores(world.rank, find_cpus(), threads, find_quota())
    )
    mine = NodeRow([], None, variables.find_variables(examiner.before))
    if bindings is not None:
        runs = directories.DirectoryFacts(True, problem)
        if token:
            runs = directories.look_at_runs(settings.runs_dir, token)
        data = directories.look_at_data(settings.data_dir)
        names = name_resolution.finish_resolution(resolution)
        found = limits.find_limits(examiner.fabrics)
        findings = [
            name_resolution.judge_host_name(names, world.node_count),
            cores.judge_cores(bindings),
            cores.judge_threads(bindings),
            limits.judge_locked_memory(found),
            limits.judge_open_files(found, world.size),
            limits.judge_shared_memory(found),
            limits.judge_core_files(found, world.size),
            variables.judge_fabric(examiner.fabrics, examiner.variables, world.node_count),
            leftovers.judge_leftovers(leftovers.find_leftovers()),
            directories.judge_runs(settings.runs_dir, runs, world.node_count),
        ]
        mine = NodeRow(findings, data, mine.variables)
    return examiner.gather_nodes(mine)

"""``python -m benchmarks allreduce``, and the other commands that measure collectives.

Every contender's result is checked before it is timed, and what counts of each iteration is its
slowest rank's time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import psutil

from benchmarks.measure.checks import check_run
from benchmarks.measure.collectives import report
from benchmarks.measure.collectives.findings import Findings, Surroundings
from benchmarks.measure.collectives.measurement import check_memory, measure
from benchmarks.measure.collectives.options import Plan, check_algorithms, parse
from benchmarks.measure.collectives.targets import judge
from benchmarks.measure.launching.launchers import Mpirun
from benchmarks.measure.launching.srun import Launcher, Srun
from benchmarks.measure.trials import WrongResultError
from benchmarks.records.contenders import ALL_REDUCE, POINT_TO_POINT
from benchmarks.records.options import RunOptions
from benchmarks.show import results


def check(options: RunOptions[Plan]) -> Launcher:
    """Refuse what cannot be measured, before anything is started; returns the launcher."""
    plan = options.plan
    if plan.quantity == ALL_REDUCE:
        check_algorithms(plan)
    launcher = check_run(options, plan.ranks, link=plan.link)
    if isinstance(launcher, Mpirun):
        check_memory(plan, max(plan.ranks), 1, psutil.virtual_memory().available)
    return launcher


def main(command: str, arguments: Sequence[str]) -> None:
    options = parse(command, arguments)
    launcher = check(options)
    groups: list[Findings] = []
    with results.open_output(command, options, launcher) as output:
        try:
            for ranks, each in list_runs(options.plan, launcher):
                groups.append(Findings(plan=options.plan, surroundings=Surroundings(ranks=ranks)))
                groups[-1].collect(measure(ranks, each, options.plan), output.record)
        finally:
            # Whatever was measured before an interruption or an error.
            show(options, groups, output)
    if wrong := report.list_wrong(groups):
        raise WrongResultError(f"wrong results: {'; '.join(wrong)}")


def list_runs(plan: Plan, launcher: Launcher) -> list[tuple[int, Launcher]]:
    """What is measured one after the other: numbers of ranks, and where.

    Point-to-point is measured between two ranks of a node, then, if there are several nodes,
    between two nodes.
    """
    if plan.quantity == POINT_TO_POINT and isinstance(launcher, Srun) and launcher.nodes > 1:
        return [(2, replace(launcher, nodes=1)), (2, launcher)]
    return [(ranks, launcher) for ranks in plan.ranks]


def show(options: RunOptions[Plan], groups: Sequence[Findings], output: results.Output) -> None:
    """Print the tables, and what was asked for beside them."""
    known = [found for found in groups if found.cells or found.refusals]
    targets = judge(known, output.environment["cores"]) if options.targets else ()
    output.show(*map(report.format_findings, known), targets=targets)

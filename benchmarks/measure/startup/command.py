"""``python -m benchmarks startup``: launch to first all-reduce, mpiddp beside torchrun.

Whole processes are timed, since that is what a user waits for; rank 0's first all-reduce and, on a
cluster, the phases of mpiddp's start-up are reported beside it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NoReturn

from tqdm import tqdm

from benchmarks.measure.checks import check_run
from benchmarks.measure.launching import processes
from benchmarks.measure.launching.srun import Launcher, Srun
from benchmarks.measure.startup import phases, report
from benchmarks.measure.startup.contenders import (
    Contender,
    list_contenders,
    list_helps,
    list_on_cluster,
)
from benchmarks.measure.startup.report import Failure, Group
from benchmarks.measure.startup.targets import judge
from benchmarks.measure.trials import Rounds
from benchmarks.records.options import (
    Count,
    CountOrZero,
    Ranks,
    RunOptions,
    Seconds,
    make_parser,
    make_reader,
)
from benchmarks.records.statistics import interleave
from benchmarks.show import results
from benchmarks.show.progress import show_progress

RANKS_ON_CLUSTER = (4, 8, 16)


@dataclass(frozen=True, kw_only=True)
class Plan(Rounds):
    """What is measured."""

    ranks: Ranks = (2, 4)
    """Numbers of ranks (default: 2 4; with srun 4 8 16)."""
    repetitions: Count = 10
    warm_up: CountOrZero = 1
    deadline: Seconds = 120.0


READER = make_reader(
    command="startup",
    description="Time whole processes from launch to first all-reduce, in turns: mpiddp under "
    "mpirun or srun, torchrun with the same script, and the floor, importing torch.",
    groups={"what is measured": Plan, "the run": RunOptions},
)
parse = make_parser(READER, Plan, RANKS_ON_CLUSTER)


def check(options: RunOptions[Plan]) -> Launcher:
    return check_run(options, options.plan.ranks)


def measure(options: RunOptions[Plan], launcher: Launcher) -> Iterator[Group]:
    """Time all contenders, one group per number of ranks, and beside an mpirun ``--help``.

    Raises RunError, with its output, if any run fails; on a cluster, if one fails twice.
    """
    if isinstance(launcher, Srun):
        groups = [(ranks, list_on_cluster(ranks, launcher)) for ranks in options.plan.ranks]
    else:
        groups = [(ranks, list_contenders(ranks, launcher)) for ranks in options.plan.ranks]
        groups.append((0, list_helps()))
    rounds = options.plan.warm_up + options.plan.repetitions
    total = rounds * sum(len(contenders) for _, contenders in groups)
    with show_progress(total, "run") as bar:
        for ranks, each in groups:
            yield _measure_group(ranks, launcher.nodes, each, options.plan, bar)


def _measure_group(
    ranks: int,
    nodes: int | None,
    contenders: Sequence[Contender],
    plan: Plan,
    bar: tqdm[NoReturn],
) -> Group:
    programs = {contender.name: contender.program for contender in contenders}
    failures: list[Failure] = []

    def time(name: str) -> processes.Run:
        bar.set_description(f"{name}, {ranks} ranks" if ranks else name)
        try:
            run = processes.run(programs[name], plan.deadline)
        except processes.RunError as error:
            # Clusters lose runs by themselves; one that is lost twice is not the cluster's.
            if not programs[name].reaches_out:
                raise
            failures.append(Failure(name, str(error)))
            run = processes.run(programs[name], plan.deadline)
        bar.update()
        return run

    series = interleave(
        list(programs), time, rounds=plan.repetitions, warm_up=plan.warm_up, seed=plan.seed
    )
    return Group(
        ranks=ranks,
        nodes=nodes,
        contenders=tuple(contenders),
        series=series,
        failures=tuple(failures),
    )


def main(arguments: Sequence[str]) -> None:
    options = parse(arguments)
    launcher, seed = check(options), options.plan.seed
    with results.open_output("startup", options, launcher) as output:
        groups = []
        for group in measure(options, launcher):
            for cell in (*report.make_cells(group), *phases.make_cells(group)):
                output.record.add(cell)
            for each in group.failures:
                output.record.fail(report.QUANTITY, each.contender, each.message, ranks=group.ranks)
            groups.append(group)
        parts = [*map(report.format_group, groups), phases.format_phases(groups, seed)]
        output.show(*parts, targets=judge(groups, seed) if options.targets else ())

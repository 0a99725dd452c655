"""Launch to first all-reduce, mpiddp beside torchrun: whole processes in turns, and their cells.

Whole processes are timed, since that is what a user waits for; rank 0's first all-reduce and, on a
cluster, the phases of mpiddp's start-up are reported beside it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from benchmarks.measure.engine import CellGroup, Quantity
from benchmarks.measure.launching import processes
from benchmarks.measure.launching.processes import Run, RunError
from benchmarks.measure.launching.srun import Launcher, Srun
from benchmarks.measure.startup.launches import (
    SESSION,
    Launch,
    list_contenders,
    list_helps,
    list_on_cluster,
)
from benchmarks.measure.startup.tables import OWN, PHASE, SHOWN, START_UP, tabulate
from benchmarks.measure.startup.targets import judge
from benchmarks.measure.trials import FAILED, Refusal, Rounds
from benchmarks.records.options import Count, CountOrZero, Ranks, RunOptions, Seconds
from benchmarks.records.schema import Cell, make_cell
from benchmarks.records.statistics import Series, make_series, take_turns
from benchmarks.show.progress import show_progress


@dataclass(frozen=True, kw_only=True)
class StartupPlan(Rounds):
    """What is measured."""

    ranks: Ranks = ()
    """Numbers of ranks (default: 2 4; with srun 4 8 16)."""
    repetitions: Count = 10
    warm_up: CountOrZero = 1
    deadline: Seconds = 120.0


def complete(options: RunOptions[StartupPlan]) -> StartupPlan:
    ranks = options.choose_ranks(options.plan.ranks, here=(2, 4), on_cluster=(4, 8, 16))
    return replace(options.plan, ranks=ranks)


def measure(plan: StartupPlan, launcher: Launcher) -> Iterator[CellGroup]:
    """Time all contenders, by number of ranks, and beside an mpirun ``--help``, as 0 ranks.

    Raises RunError, with its output, if any run fails; on a cluster, if one fails twice.
    """
    if isinstance(launcher, Srun):
        groups = [(ranks, list_on_cluster(ranks, launcher)) for ranks in plan.ranks]
    else:
        groups = [(ranks, list_contenders(ranks, launcher)) for ranks in plan.ranks]
        groups.append((0, list_helps()))
    for ranks, contenders in groups:
        yield from measure_group(plan, ranks, launcher.nodes, contenders)


def measure_group(
    plan: StartupPlan, ranks: int, nodes: int | None, contenders: Sequence[Launch]
) -> Iterator[CellGroup]:
    """One group; after an interruption, which is passed on, that of the whole rounds."""
    by_name = {contender.name: contender for contender in contenders}
    failures: list[Refusal] = []

    def time(name: str) -> Run:
        bar.set_description(f"{name}, {ranks} ranks" if ranks else name)
        program = by_name[name].program
        try:
            run = processes.run(program, plan.deadline)
        except RunError as error:
            # Clusters lose runs by themselves; one that is lost twice is not the cluster's.
            if not program.reaches_out:
                raise
            failures.append(Refusal(START_UP, name, str(error), FAILED, {"ranks": ranks}))
            run = processes.run(program, plan.deadline)
        bar.update()
        return run

    def make_group() -> CellGroup:
        whole = min(map(len, visits.values()))
        cells = [
            cell
            for name, found in visits.items()
            for cell in make_cells(by_name[name], make_series(found[:whole], plan.warm_up), place)
        ]
        return CellGroup(ranks=ranks, nodes=nodes, cells=cells, refusals=failures)

    visits: dict[str, list[tuple[int, Run]]] = {name: [] for name in by_name}
    place, rounds = {"ranks": max(1, ranks), "nodes": nodes or 1}, plan.warm_up + plan.repetitions
    with show_progress(rounds * len(contenders), "run") as bar:
        try:
            for position, name in take_turns(list(by_name), rounds=rounds, seed=plan.seed):
                visits[name].append((position, time(name)))
        except KeyboardInterrupt:
            if min(map(len, visits.values())) > plan.warm_up:
                yield make_group()
            raise
    yield make_group()


def make_cells(contender: Launch, series: Series[Run], place: dict[str, int]) -> Iterator[Cell]:
    """Of whole processes, of the time to the first all-reduce, and of reported phases."""

    def make(values: Sequence[float], quantity: str = START_UP, **more: Any) -> Cell:
        return make_cell(values, quantity=quantity, contender=contender.name, **place, **more)

    runs = series.samples
    details = {
        "kind": contender.kind,
        "about": contender.about,
        "command": contender.describe(),
        "cpu_seconds": [run.cpu_seconds for run in runs],
        "others_cpu_seconds": [run.others_cpu_seconds for run in runs],
        "positions": series.positions,
        "warm_up": [run.seconds for run in series.warm_up],
    }
    yield make([run.seconds for run in runs], details=details)
    first = [run.stamp_seconds for run in runs if run.stamp_seconds is not None]
    if first:
        yield make(first, at={"part": "first all-reduce"})
    reported = [run.phases for run in runs if run.phases]
    for name in SHOWN if reported and contender.name == SESSION else ():
        # Of its slowest rank.
        values = [phases[name] for phases in reported]
        yield make(values, PHASE, at={"phase": name}, details={"is_own": name in OWN})


QUANTITY = Quantity(
    command="startup",
    description="Time whole processes from launch to first all-reduce, in turns: mpiddp under "
    "mpirun or srun, torchrun with the same script, and the floor, importing torch.",
    on_cluster=True,
    plan=StartupPlan,
    complete=complete,
    measure=measure,
    tabulate=tabulate,
    judge=judge,
)

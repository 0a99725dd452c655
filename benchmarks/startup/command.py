"""``python -m benchmarks startup``: launch to first all-reduce, mpiddp beside torchrun.

Whole processes are timed, from before the launcher is started until it has ended, since that is
what a user waits for; rank 0's first all-reduce is reported beside it. The floor is as many
processes at once as there are ranks, each of which only imports torch. On a cluster
(``--launcher srun``) the phases of mpiddp's start-up are reported as well.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from tqdm import tqdm

from benchmarks.common import results
from benchmarks.common.options import at_least, positive
from benchmarks.common.statistics import interleave, summarize
from benchmarks.launching import launchers, processes
from benchmarks.launching.srun import Srun, find_srun, is_srun
from benchmarks.startup import phases, report
from benchmarks.startup.contenders import (
    Contender,
    list_contenders,
    list_helps,
    list_on_cluster,
)
from benchmarks.startup.report import Failure, Group
from mpiddp.errors import ConfigurationError, LaunchError
from mpiddp.launch.arguments import Parser
from mpiddp.launch.launcher.launcher import find_launcher

RANKS = (2, 4)
RANKS_ON_CLUSTER = (4, 8, 16)


@dataclass(frozen=True)
class Options:
    """What is measured, and where the results go."""

    ranks: tuple[int, ...]
    repetitions: int
    """Rounds that count."""
    warm_up: int
    """Rounds before them."""
    seed: int
    """Of the order within each round."""
    deadline: float
    """Seconds for one run."""
    launcher: str | None
    nodes: int | None
    """Of a cluster; None for as many as there are, or without one."""
    json: Path | None
    plot: Path | None


def parse(arguments: Sequence[str]) -> Options:
    """Read the command line. Raises ConfigurationError; SystemExit(0) after ``--help``."""
    parser = Parser(
        prog="python -m benchmarks startup",
        description="Time whole processes from launch to first all-reduce, in turns: mpiddp "
        "under mpirun or srun, torchrun with the same script, and the floor, importing torch.",
        allow_abbrev=False,
    )
    count, number = at_least(1), at_least(0)
    add = parser.add_argument
    add("--ranks", type=count, nargs="+", metavar="N", help="default: 2 4; with srun 4 8 16")
    add("--repetitions", type=count, default=10, metavar="N", help="rounds (default: 10)")
    add("--warm-up", type=number, default=1, metavar="N", help="rounds before them (default: 1)")
    add("--seed", type=number, default=0, metavar="N", help="of the order (default: 0)")
    add(
        "--deadline",
        type=positive("seconds"),
        default=120.0,
        metavar="SECONDS",
        help="per run (default: 120)",
    )
    add("--launcher", metavar="PROGRAM", help="mpirun to use (default: MPIDDP_MPIRUN, or this "
        "Python's, or the first in PATH), or srun")  # fmt: skip
    add("--nodes", type=count, metavar="N", help="with srun: nodes to spread the ranks over "
        "evenly (default: the allocation's or the cluster's, if they go into --ranks)")  # fmt: skip
    add("--json", type=Path, metavar="FILE", help="write every sample and the environment")
    add("--plot", type=Path, metavar="FILE", help="draw the samples (.svg, .png or .pdf)")
    values = vars(parser.parse_args(arguments))
    usual = RANKS_ON_CLUSTER if is_srun(values["launcher"]) else RANKS
    return Options(**{**values, "ranks": tuple(dict.fromkeys(values["ranks"] or usual))})


def check(options: Options) -> launchers.Mpirun | Srun:
    """Refuse what cannot work before anything is measured; returns the launcher to use."""
    outputs = (options.json, options.plot)
    return check_start(options.ranks, options.launcher, options.nodes, *outputs)


def check_start(
    ranks: tuple[int, ...],
    wanted: str | None,
    nodes: int | None,
    json: Path | None,
    plot: Path | None,
) -> launchers.Mpirun | Srun:
    """What every benchmark that starts ranks must refuse; returns the launcher to use.

    Raises LaunchError and ConfigurationError.
    """
    launcher = find_launcher()
    # A step of one task holds its allocation's cores: a step inside would wait for it.
    fewest = 1 if is_srun(wanted) else 2
    if launcher is not None and (launcher.size or 1) >= fewest:
        raise LaunchError(
            f"{launcher.name} started {_count_processes(launcher.size)} of this benchmark, which "
            "starts its ranks itself: run it without a launcher"
        )
    for path in filter(None, (json, plot)):
        results.check_writable(path)
    if plot is not None:
        from benchmarks.common.plotting import check_drawable

        check_drawable(plot)
    if wanted is not None and is_srun(wanted):
        return find_srun(wanted, nodes, ranks)
    if nodes is not None:
        raise ConfigurationError("--nodes needs a cluster: --launcher srun")
    return launchers.find_mpirun(wanted)


def _count_processes(size: int | None) -> str:
    return "one process" if size == 1 else f"{size or 'several'} processes"


def measure(options: Options, launcher: launchers.Mpirun | Srun) -> list[Group]:
    """Time all contenders, one group per number of ranks, and beside an mpirun ``--help``.

    Raises RunError, with its output, if any run fails; on a cluster, if one fails twice.
    """
    nodes = launcher.nodes if isinstance(launcher, Srun) else None
    if isinstance(launcher, Srun):
        groups = [(ranks, list_on_cluster(ranks, launcher)) for ranks in options.ranks]
    else:
        groups = [(ranks, list_contenders(ranks, launcher)) for ranks in options.ranks]
        groups.append((0, list_helps()))
    rounds = options.warm_up + options.repetitions
    total = rounds * sum(len(contenders) for _, contenders in groups)
    # disable=None: a bar only on a terminal.
    with tqdm(total=total, disable=None, unit="run", leave=False) as bar:
        return [_measure_group(ranks, nodes, each, options, bar) for ranks, each in groups]


def _measure_group(
    ranks: int,
    nodes: int | None,
    contenders: Sequence[Contender],
    options: Options,
    bar: tqdm[NoReturn],
) -> Group:
    programs = {contender.name: contender.program for contender in contenders}
    failures: list[Failure] = []

    def time(name: str) -> processes.Run:
        bar.set_description(f"{name}, {ranks} ranks" if ranks else name)
        try:
            run = processes.run(programs[name], options.deadline)
        except processes.RunError as error:
            # Clusters lose runs by themselves; one that is lost twice is not the cluster's.
            if not programs[name].reaches_out:
                raise
            failures.append(Failure(name, str(error)))
            run = processes.run(programs[name], options.deadline)
        bar.update()
        return run

    series = interleave(
        list(programs),
        time,
        rounds=options.repetitions,
        warm_up=options.warm_up,
        seed=options.seed,
    )
    return Group(ranks, tuple(contenders), series, nodes, tuple(failures))


def describe(groups: Sequence[Group], targets: Sequence[report.Target], seed: int) -> str:
    """All that is printed."""
    parts = []
    for group in groups:
        lines = [
            report.format_table(group),
            report.describe_warm_up(group),
            report.describe_others(group),
            report.describe_failures(group),
        ]
        parts.append("\n".join(filter(None, lines)))
    parts.append(phases.format_phases(groups, seed))
    parts.append("\n".join(f"target: {target}" for target in targets))
    return "\n\n".join(filter(None, parts))


def describe_environment(environment: Mapping[str, Any]) -> str:
    """The line above the tables."""
    nodes = environment["nodes"]
    cluster = f"{environment['launcher']}, {nodes} nodes, " if nodes else ""
    return (
        f"{cluster}{environment['mpi_library'] or environment['launcher']}, "
        f"torch {environment['packages']['torch']}, Python {environment['python']}, "
        f"{environment['processor']}, {environment['cores']} cores; "
        f"OMP_NUM_THREADS={environment['threads_per_process']}, processes unbound"
    )


def draw_groups(path: Path, groups: Sequence[Group], note: str) -> None:
    """Draw the groups of ranks, one panel each, and mpiddp's own phases where they are known."""
    from benchmarks.common.plotting import BLUE, GREY, ORANGE, Panel, Row, Stack, StackPanel, draw

    colours = {"mpiddp": BLUE, "torchrun": ORANGE, "floor": GREY}
    panels = [
        Panel(
            group.title,
            tuple(
                Row(each.name, tuple(group.seconds(each.name)), colours[each.kind])
                for each in group.contenders
            ),
        )
        for group in groups
        if group.ranks
    ]
    stacks = tuple(
        Stack(
            group.title,
            {
                name: 1e3 * summarize(phases.phase_seconds(group)[name]).median
                for name in phases.OWN
            },
            tuple(1e3 * seconds for seconds in phases.own_seconds(group)),
        )
        for group in phases.measured(groups)
    )
    own = None
    if stacks:
        head = "mpiddp's own phases, each its slowest rank's: medians; points: sums by run"
        own = StackPanel(head, stacks, "milliseconds")
    title = "Launch to first all-reduce and back"
    draw(path, panels, own, title=title, unit="seconds of the whole process", note=note)


def main(arguments: Sequence[str]) -> None:
    """Measure, print the tables and write what was asked for."""
    options = parse(arguments)
    launcher = check(options)
    environment = results.describe_environment(launcher)
    heading = describe_environment(environment)
    print(f"{heading}; load {os.getloadavg()[0]:.1f}\n")
    groups = measure(options, launcher)
    targets = report.judge(groups) + phases.judge(groups, options.seed)
    print(describe(groups, targets, options.seed))
    if options.json is not None:
        results.write_record(
            options.json,
            "startup",
            {
                "environment": environment,
                "load_average_after": list(os.getloadavg()),
                "seed": options.seed,
                "groups": report.describe_groups(groups),
                "phases": phases.describe_phases(groups, options.seed),
                "targets": report.describe_targets(targets),
            },
        )
    if options.plot is not None:
        draw_groups(options.plot, groups, heading)

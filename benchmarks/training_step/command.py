"""``python -m benchmarks training-step``: what a training step takes, by synchronisation.

The framework's DDP (over Gloo, in processes that torchrun starts and that know no MPI; over NCCL
where every rank has a GPU), mpiddp's schedules and parameter servers, and ``nn.DataParallel`` where
there are GPUs. Two jobs live side by side for the whole measurement; while one measures, the other
one sleeps. What every contender trains is checked before it is timed. Rounds are in random order.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.common import results
from benchmarks.common.options import at_least, describe_algorithms, positive
from benchmarks.launching import launchers
from benchmarks.launching.srun import Srun, is_srun
from benchmarks.startup import command as startup
from benchmarks.training_step import report as tables
from benchmarks.training_step.contenders import (
    DATA_PARALLEL,
    TRANSPORTS,
    USUAL,
    WIRE_DTYPES,
    Contender,
    expand,
    parse_contender,
)
from benchmarks.training_step.targets import judge
from benchmarks.training_step.visits import FEWEST, MOST, VISIT_SECONDS, Plan, measure
from benchmarks.training_step.workloads import SHAPES, parse_workload
from mpiddp.errors import ConfigurationError, MpiddpError
from mpiddp.launch.arguments import Parser
from mpiddp.schedules.registry import check_servers
from mpiddp.schedules.registry import parse as parse_algorithm
from mpiddp.training.straggler import parse_straggler

RANKS = (2, 4)
RANKS_ON_CLUSTER = (4,)
DEVICES = ("auto", "cpu", "gpu")


class WrongTrainingError(MpiddpError):
    """A contender trains something else."""


@dataclass(frozen=True)
class Options:
    """What is measured, where, and where the results go."""

    plan: Plan
    ranks: tuple[int, ...]
    launcher: str | None
    nodes: int | None
    """Of a cluster; None for as many as there are, or without one."""
    json: Path | None
    plot: Path | None


def parse(arguments: Sequence[str]) -> Options:
    """Read the command line. Raises ConfigurationError; SystemExit(0) after ``--help``."""
    values = vars(_make_parser().parse_args(arguments))
    ranks = values["ranks"] or (RANKS_ON_CLUSTER if is_srun(values["launcher"]) else RANKS)
    transports, wires = (tuple(dict.fromkeys(values[n])) for n in ("transports", "wire_dtype"))
    named = [parse_contender(text) for text in values["sync"] or USUAL]
    rows = [row for each in named for row in expand(each, transports, wires)]
    plan = Plan(
        workloads=tuple(dict.fromkeys(map(parse_workload, values["models"]))),
        contenders=tuple(dict.fromkeys(rows)),
        offers_data_parallel=values["sync"] is None,
        **{
            name: values[name]
            for name in (
                "batch_size", "repetitions", "warm_up", "iterations", "seed", "deadline", "link",
                "straggler", "device",
            )
        },
    )  # fmt: skip
    others = {name: values[name] for name in ("launcher", "nodes", "json", "plot")}
    return Options(plan, tuple(dict.fromkeys(ranks)), **others)


def _make_parser() -> Parser:
    parser = Parser(
        prog="python -m benchmarks training-step",
        description="Time training steps in turns, by synchronisation: compute, communication that "
        "nothing hides, update; with samples per second, efficiency and bytes.",
        epilog="SYNC is framework, framework-fused, auto, an algorithm, parameter-server (as "
        "parameter-server:servers=ranks,placement=dedicated,staleness=3), or data-parallel. "
        f"{describe_algorithms('ring:segments=4')}",
        allow_abbrev=False,
    )
    count, number = at_least(1), at_least(0)
    add = parser.add_argument
    add("--models", nargs="+", metavar="MODEL", default=tuple(SHAPES),
        help=f"{', '.join(SHAPES)} or mlp:megabytes=M "
        "(default: all, the mlp with 67)")  # fmt: skip
    add("--sync", nargs="+", metavar="SYNC", help=f"default: {' '.join(USUAL)}, and data-parallel "
        "where one process has as many GPUs as there are ranks")  # fmt: skip
    add("--transports", nargs="+", choices=TRANSPORTS, default=("auto",), metavar="TRANSPORT",
        help=f"of mpiddp's gradients: {', '.join(TRANSPORTS)} (default: auto)")  # fmt: skip
    add("--wire-dtype", nargs="+", choices=WIRE_DTYPES, default=("auto",), metavar="TYPE",
        help=f"of mpiddp's gradients on their way: {', '.join(WIRE_DTYPES)}")  # fmt: skip
    add("--batch-size", type=count, default=8, metavar="N", help="samples per worker (default: 8)")
    add("--device", choices=DEVICES, default="auto", metavar="DEVICE", help="auto, cpu or gpu; "
        "auto takes GPUs where every rank has one")  # fmt: skip
    add("--straggler", metavar="WHO=FACTOR", help="slow a worker's passes: RANK=FACTOR, or "
        "random=FACTOR, drawn anew for each step")  # fmt: skip
    add("--ranks", type=count, nargs="+", metavar="N", help="default: 2 4; with srun 4")
    add("--repetitions", type=count, default=5, metavar="N", help="rounds (default: 5)")
    add("--warm-up", type=number, default=0, metavar="N", help="rounds before them, after a first "
        "visit to each (default: 0)")  # fmt: skip
    add("--iterations", type=count, metavar="N", help="steps per visit (default: as many as fit "
        f"into {VISIT_SECONDS:g} s, from {FEWEST} to {MOST})")  # fmt: skip
    add("--seed", type=number, default=0, metavar="N", help="of parameters, samples and the order")
    add("--deadline", type=positive("seconds"), default=300.0, metavar="SECONDS",
        help="for a job to start, and for each of its answers (default: 300)")  # fmt: skip
    add("--launcher", metavar="PROGRAM", help="mpirun to use (default: MPIDDP_MPIRUN, or this "
        "Python's, or the first in PATH), or srun")  # fmt: skip
    add("--nodes", type=count, metavar="N", help="with srun: nodes to spread the ranks over "
        "evenly (default: the allocation's or the cluster's, if they go into --ranks)")  # fmt: skip
    add("--link", action="store_true", help="with srun: time a link between two nodes, and compare "
        "servers with the cost model")  # fmt: skip
    add("--json", type=Path, metavar="FILE", help="write every visit and the environment")
    add("--plot", type=Path, metavar="FILE", help="draw the parts (.svg, .png or .pdf)")
    return parser


def check(options: Options) -> launchers.Mpirun | Srun:
    """Refuse what cannot work before anything is measured; returns the launcher to use."""
    plan = options.plan
    if min(options.ranks) < 2:
        raise ConfigurationError("--ranks: expected at least 2, found 1")
    for ranks in options.ranks:
        for contender in plan.contenders:
            check_contender(contender, ranks, plan)
    if plan.straggler is not None:
        slow = parse_straggler(plan.straggler).rank
        if slow is not None and slow >= min(options.ranks):
            raise ConfigurationError(
                f"--straggler: expected a rank below {min(options.ranks)}, the fewest of --ranks, "
                f"found {slow}"
            )
    results.check_outputs(options.json, options.plot)
    outputs = (options.json, options.plot)
    found = startup.check_start(options.ranks, options.launcher, options.nodes, *outputs)
    if plan.link and not (isinstance(found, Srun) and found.nodes > 1):
        raise ConfigurationError("--link needs two nodes of a cluster: --launcher srun --nodes 2")
    return found


def check_contender(contender: Contender, ranks: int, plan: Plan) -> None:
    """Raise ConfigurationError for what is not possible on so many ranks."""
    contender.configure(ranks, plan.batch_size, plan.seed)
    if contender.serves:
        dedicated = contender.placement == "dedicated"
        try:
            check_servers(ranks, contender.count_servers(ranks), dedicated=dedicated)
        except ConfigurationError as error:
            raise ConfigurationError(f"--sync {contender.name}: {error}") from None
    elif contender.averages and contender.sync != "auto":
        members = parse_algorithm(contender.sync).build(ranks).members
        if len(members) < ranks:
            raise ConfigurationError(
                f"--sync {contender.sync}: it leaves out the gradients of {ranks - len(members)} "
                f"of {ranks} ranks, which only serve; give parameter-server"
            )
    elif contender.sync == DATA_PARALLEL and plan.device == "cpu":
        raise ConfigurationError("--sync data-parallel drives GPUs, but --device is cpu")


def main(arguments: Sequence[str]) -> None:
    """Measure, print the tables and write what was asked for."""
    options = parse(arguments)
    launcher = check(options)
    environment: dict[str, Any] = results.describe_environment(launcher)
    heading = startup.describe_environment(environment)
    print(f"{heading}; load {os.getloadavg()[0]:.1f}\n{tables.EXPLANATION}\n", flush=True)
    groups = []
    for ranks in options.ranks:
        for group in measure(ranks, launcher, options.plan):
            print(f"{tables.format_group(group)}\n", flush=True)
            groups.append(group)
    targets = judge(groups)
    for target in targets:
        print(f"target: {target}")
    if options.json is not None:
        content = {
            "environment": environment,
            "load_average_after": list(os.getloadavg()),
            "groups": [tables.describe_group(group) for group in groups],
            "targets": [asdict(target) for target in targets],
        }
        results.write_record(options.json, "training-step", content)
    if options.plot is not None:
        from benchmarks.training_step.plot import draw

        draw(options.plot, groups, heading)
    if wrong := tables.list_wrong(groups):
        raise WrongTrainingError(f"wrong training: {'; '.join(wrong)}")

"""``python -m benchmarks allreduce``: one all-reduce beside the others, by size.

The framework's (Gloo, in processes that torchrun starts and that know no MPI; NCCL where every
rank has a GPU), MPI's own, a plain ring written by hand, and mpiddp's. Two jobs live side by side
for the whole measurement, one under mpirun or srun and one under torchrun; while one measures, the
other one sleeps. Every contender's sum is checked before it is timed. Rounds are in random order,
and what counts of each iteration is its slowest rank's time.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path

from benchmarks.allreduce import report as tables
from benchmarks.allreduce.contenders import BUFFERS, PRIVATE, SHARED, TRANSPORTS
from benchmarks.allreduce.targets import Target, judge
from benchmarks.allreduce.visits import FEWEST, MOST, VISIT_SECONDS, Group, Plan, measure
from benchmarks.common import results
from benchmarks.common.options import at_least, describe_algorithms, positive, size
from benchmarks.launching import launchers
from benchmarks.launching.srun import Srun, is_srun
from benchmarks.startup import command as startup
from mpiddp.errors import ConfigurationError, MpiddpError
from mpiddp.launch.arguments import Parser
from mpiddp.schedules.registry import names
from mpiddp.schedules.registry import parse as parse_algorithm

RANKS = (2, 4)
RANKS_ON_CLUSTER = (4, 8)
SIZES = tuple(map(size, ("8", "512", "4K", "32K", "256K", "1M", "4M", "16M", "64M")))
ITEM_BYTES = {"float32": 4, "float64": 8, "float16": 2, "bfloat16": 2, "int32": 4, "int64": 8}
ALL = "all"


class WrongSumError(MpiddpError):
    """A contender's all-reduce is none."""


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
    usual = RANKS_ON_CLUSTER if is_srun(values["launcher"]) else RANKS
    plan = Plan(
        sizes=tuple(sorted(set(values["sizes"]))),
        type=values["type"],
        algorithms=_read_algorithms(values["algorithms"]),
        transports=tuple(dict.fromkeys(values["transports"])),
        buffers=tuple(dict.fromkeys(values["buffers"])),
        repetitions=values["repetitions"],
        warm_up=values["warm_up"],
        iterations=values["iterations"],
        seed=values["seed"],
        deadline=values["deadline"],
        link=values["link"],
    )
    others = {name: values[name] for name in ("launcher", "nodes", "json", "plot")}
    return Options(plan, tuple(dict.fromkeys(values["ranks"] or usual)), **others)


def _make_parser() -> Parser:
    parser = Parser(
        prog="python -m benchmarks allreduce",
        description="Time all-reduces in turns, by size: the framework's, MPI's, a plain ring, "
        "and mpiddp's.",
        epilog=f"{describe_algorithms('ring:segments=4')} auto lets mpiddp choose.",
        allow_abbrev=False,
    )
    count, number = at_least(1), at_least(0)
    add = parser.add_argument
    add("--sizes", type=size, nargs="+", metavar="BYTES", default=SIZES,
        help="as 4096, 64K or 16M (default: 8 to 64M, in nine steps)")  # fmt: skip
    add("--type", choices=ITEM_BYTES, default="float32", metavar="TYPE",
        help=f"of the elements: {', '.join(ITEM_BYTES)} (default: float32)")  # fmt: skip
    add("--algorithms", nargs="+", default=("auto", "ring"), metavar="ALGORITHM",
        help="of mpiddp, or all (default: auto ring)")  # fmt: skip
    add("--transports", nargs="+", choices=TRANSPORTS, default=("auto",), metavar="TRANSPORT",
        help=f"of mpiddp: {', '.join(TRANSPORTS)} (default: auto)")  # fmt: skip
    add("--buffers", nargs="+", choices=BUFFERS, default=(PRIVATE, SHARED), metavar="BUFFER",
        help=f"of mpiddp: {', '.join(BUFFERS)} (default: private shared)")  # fmt: skip
    add("--ranks", type=count, nargs="+", metavar="N", help="default: 2 4; with srun 4 8")
    add("--repetitions", type=count, default=10, metavar="N", help="rounds (default: 10)")
    add("--warm-up", type=number, default=1, metavar="N", help="rounds before them (default: 1)")
    add("--iterations", type=count, metavar="N", help="per contender, size and round (default: as "
        f"many as fit into {VISIT_SECONDS:g} s, from {FEWEST} to {MOST})")  # fmt: skip
    add("--seed", type=number, default=0, metavar="N", help="of the order (default: 0)")
    add("--deadline", type=positive("seconds"), default=120.0, metavar="SECONDS",
        help="for a job to start, and for each of its answers (default: 120)")  # fmt: skip
    add("--launcher", metavar="PROGRAM", help="mpirun to use (default: MPIDDP_MPIRUN, or this "
        "Python's, or the first in PATH), or srun")  # fmt: skip
    add("--nodes", type=count, metavar="N", help="with srun: nodes to spread the ranks over "
        "evenly (default: the allocation's or the cluster's, if they go into --ranks)")  # fmt: skip
    add("--link", action="store_true", help="with srun: time a link between two nodes, too")
    add("--json", type=Path, metavar="FILE", help="write every iteration and the environment")
    add("--plot", type=Path, metavar="FILE", help="draw times and rates (.svg, .png or .pdf)")
    return parser


def _read_algorithms(texts: Sequence[str]) -> tuple[str, ...]:
    """The names as mpiddp takes them, each once. Raises ConfigurationError for an unknown one."""
    found: list[str] = []
    for text in texts:
        if text == ALL:
            found += ["auto", *names()]
        else:
            found.append(text if text == "auto" else str(parse_algorithm(text)))
    return tuple(dict.fromkeys(found))


def check(options: Options) -> launchers.Mpirun | Srun:
    """Refuse what cannot work before anything is measured; returns the launcher to use."""
    plan = options.plan
    item = ITEM_BYTES[plan.type]
    for count in plan.sizes:
        if count == 0 or count % item:
            raise ConfigurationError(
                f"--sizes: expected whole elements of {item} bytes ({plan.type}), found {count}"
            )
    if min(options.ranks) < 2:
        raise ConfigurationError("--ranks: expected at least 2, found 1")
    for name, ranks in product(plan.algorithms, options.ranks):
        check_algorithm(name, ranks)
    results.check_outputs(options.json, options.plot)
    outputs = (options.json, options.plot)
    found = startup.check_start(options.ranks, options.launcher, options.nodes, *outputs)
    if plan.link and not (isinstance(found, Srun) and found.nodes > 1):
        raise ConfigurationError("--link needs two nodes of a cluster: --launcher srun --nodes 2")
    return found


def check_algorithm(name: str, ranks: int) -> None:
    """Raise ScheduleError for an algorithm that is no all-reduce of so many ranks.

    What cannot be on so many ranks stands in the table.
    """
    if name != "auto":
        with suppress(ConfigurationError):
            parse_algorithm(name).build(ranks)


def report(groups: Sequence[Group], targets: Sequence[Target]) -> str:
    """All that is printed once everything is measured."""
    parts = [tables.format_group(group) for group in groups]
    parts.append("\n".join(f"target: {target}" for target in targets))
    return "\n\n".join(filter(None, parts))


def main(arguments: Sequence[str]) -> None:
    """Measure, print the tables and write what was asked for."""
    options = parse(arguments)
    launcher = check(options)
    environment = results.describe_environment(launcher)
    heading = startup.describe_environment(environment)
    print(f"{heading}; load {os.getloadavg()[0]:.1f}\n", flush=True)
    groups = [measure(ranks, launcher, options.plan) for ranks in options.ranks]
    targets = judge(groups, environment["cores"])
    print(report(groups, targets))
    if options.json is not None:
        content = {
            "environment": environment,
            "load_average_after": list(os.getloadavg()),
            "groups": tables.describe_groups(groups),
            "targets": [{**asdict(target), "met": target.met} for target in targets],
        }
        results.write_record(options.json, "allreduce", content)
    if options.plot is not None:
        from benchmarks.allreduce.plot import draw

        draw(options.plot, groups, heading)
    if wrong := tables.list_wrong(groups):
        raise WrongSumError(f"wrong sums: {'; '.join(wrong)}")

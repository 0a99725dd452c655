"""``python -m benchmarks allreduce``: one all-reduce beside the others, by size.

Every contender's sum is checked before it is timed, and what counts of each iteration is its
slowest rank's time.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from itertools import product

from benchmarks.allreduce import report
from benchmarks.allreduce.contenders import BUFFERS, PRIVATE, SHARED, TRANSPORTS
from benchmarks.allreduce.measurement import LENGTH, Plan, measure
from benchmarks.allreduce.plot import draw
from benchmarks.allreduce.targets import judge
from benchmarks.common import results
from benchmarks.common.checks import check_run
from benchmarks.common.options import (
    CommandLine,
    RunOptions,
    at_least,
    describe_algorithms,
    make,
    make_run,
    size,
)
from benchmarks.common.targets import format_targets
from benchmarks.common.trials import WrongResultError
from benchmarks.launching.launchers import Mpirun
from benchmarks.launching.srun import Srun
from mpiddp.errors import ConfigurationError
from mpiddp.schedules.registry import names
from mpiddp.schedules.registry import parse as parse_algorithm

RANKS = (2, 4)
RANKS_ON_CLUSTER = (4, 8)
SIZES = tuple(map(size, ("8", "512", "4K", "32K", "256K", "1M", "4M", "16M", "64M")))
ITEM_BYTES = {"float32": 4, "float64": 8, "float16": 2, "bfloat16": 2, "int32": 4, "int64": 8}
ALL = "all"


def parse(arguments: Sequence[str]) -> RunOptions[Plan]:
    values = _make_parser().read_values(arguments)
    values["algorithms"] = _read_algorithms(values["algorithms"])
    plan = make(Plan, values, sizes=tuple(sorted(values["sizes"])))
    return make_run(values, plan, RANKS, RANKS_ON_CLUSTER)


def _make_parser() -> CommandLine:
    parser = CommandLine(
        "allreduce",
        "Time all-reduces in turns, by size: the framework's, MPI's, a plain ring, and mpiddp's.",
        f"{describe_algorithms('ring:segments=4')} auto lets mpiddp choose.",
    )
    add = parser.add
    add("sizes", "for example 4096, 64K or 16M (default: 8 to 64M, in nine steps)", type=size,
        nargs="+", metavar="BYTES", default=SIZES)  # fmt: skip
    add("type", f"type of the elements: {', '.join(ITEM_BYTES)}", choices=ITEM_BYTES,
        default="float32", metavar="TYPE")  # fmt: skip
    add("algorithms", "mpiddp's algorithms, or all", nargs="+", default=("auto", "ring"),
        metavar="ALGORITHM")  # fmt: skip
    add("transports", f"mpiddp's transports: {', '.join(TRANSPORTS)}", nargs="+",
        choices=TRANSPORTS, default=("auto",), metavar="TRANSPORT")  # fmt: skip
    add("buffers", f"mpiddp's buffers: {', '.join(BUFFERS)}", nargs="+", choices=BUFFERS,
        default=(PRIVATE, SHARED), metavar="BUFFER")  # fmt: skip
    add("ranks", "numbers of ranks (default: 2 4; with srun 4 8)", type=at_least(2))
    add("repetitions", default=10)
    add("warm-up", default=1)
    add("iterations", f"iterations per contender, size and round (default: {LENGTH})")
    add("seed", "seed of the order")
    add("deadline", "time limit of a job's start, and of each answer", default=120.0)
    parser.add_run("write every iteration and the environment", "draw times and rates",
                   "with srun: also time a link between two nodes")  # fmt: skip
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


def check(options: RunOptions[Plan]) -> Mpirun | Srun:
    plan = options.plan
    item = ITEM_BYTES[plan.type]
    for count in plan.sizes:
        if count == 0 or count % item:
            raise ConfigurationError(
                f"--sizes: expected whole elements of {item} bytes ({plan.type}), found {count}"
            )
    for name, ranks in product(plan.algorithms, options.ranks):
        check_algorithm(name, ranks)
    return check_run(options, link=plan.link)


def check_algorithm(name: str, ranks: int) -> None:
    """Raise ScheduleError for an algorithm that is no all-reduce of so many ranks.

    One that does not support so many ranks is left out of the tables, with the reason.
    """
    if name != "auto":
        with suppress(ConfigurationError):
            parse_algorithm(name).build(ranks)


def main(arguments: Sequence[str]) -> None:
    options = parse(arguments)
    launcher = check(options)
    environment, heading = results.begin(launcher)
    groups = [measure(ranks, launcher, options.plan) for ranks in options.ranks]
    targets = judge(groups, environment["cores"]) if options.targets else None
    parts = [*map(report.format_group, groups), format_targets(targets or ())]
    print("\n\n".join(filter(None, parts)))
    described = report.describe_groups(groups)
    results.write_measurement(options.json, "allreduce", environment, targets, groups=described)
    if options.plot is not None:
        draw(options.plot, groups, heading)
    if wrong := report.list_wrong(groups):
        raise WrongResultError(f"wrong sums: {'; '.join(wrong)}")

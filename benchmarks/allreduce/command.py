"""``python -m benchmarks allreduce``: one all-reduce beside the others, by size.

Every contender's sum is checked before it is timed, and what counts of each iteration is its
slowest rank's time.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import product

from benchmarks.allreduce import report
from benchmarks.allreduce.measurement import Plan, measure
from benchmarks.allreduce.plot import draw
from benchmarks.allreduce.targets import judge
from benchmarks.common import results
from benchmarks.common.checks import check_run
from benchmarks.common.options import RunOptions, describe_algorithms, make_reader, make_run
from benchmarks.common.targets import format_targets
from benchmarks.common.trials import WrongResultError
from benchmarks.launching.launchers import Mpirun
from benchmarks.launching.srun import Srun
from mpiddp.errors import ConfigurationError
from mpiddp.schedules.registry import names
from mpiddp.schedules.registry import parse as parse_algorithm

RANKS_ON_CLUSTER = (4, 8)
ITEM_BYTES = {"float32": 4, "float64": 8, "float16": 2, "bfloat16": 2, "int32": 4, "int64": 8}
ALL = "all"


READER = make_reader(
    command="allreduce",
    description="Time all-reduces in turns, by size: the framework's, MPI's, a plain ring, and "
    "mpiddp's.",
    groups={"what is measured": Plan, "the run": RunOptions},
    epilog=f"{describe_algorithms('ring:segments=4')} auto lets mpiddp choose.",
)


def parse(arguments: Sequence[str]) -> RunOptions[Plan]:
    run = make_run(READER.read(arguments), Plan, RANKS_ON_CLUSTER)
    algorithms, sizes = _read_algorithms(run.plan.algorithms), tuple(sorted(run.plan.sizes))
    return replace(run, plan=replace(run.plan, algorithms=algorithms, sizes=sizes))


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
    for name, ranks in product(plan.algorithms, plan.ranks):
        check_algorithm(name, ranks)
    return check_run(options, plan.ranks, link=plan.link)


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
    with results.open_output("allreduce", options, launcher) as output:
        groups = [measure(ranks, launcher, options.plan) for ranks in options.plan.ranks]
        for described in report.describe_groups(groups):
            output.record.write("group", **described)
        cores = output.environment["cores"]
        targets = judge(groups, cores) if options.targets else ()
        output.record.judge(targets)
    parts = [*map(report.format_group, groups), format_targets(targets)]
    print("\n\n".join(filter(None, parts)))
    if options.plot is not None:
        draw(options.plot, groups, output.heading)
    if wrong := report.list_wrong(groups):
        raise WrongResultError(f"wrong sums: {'; '.join(wrong)}")

"""``python -m benchmarks stragglers``: how long training takes while a worker is slow.

Whole trainings of ``python -m mpiddp.train``, in turns, for each kind of straggler: the framework's
all-reduce of gradients, and of weights every so many steps, and a parameter server with each bound
on staleness. What counts is the time that training itself took, up to the first epoch whose
evaluation reached the accuracy; evaluations, and the copy of the servers' weights to all ranks
before each of them, are left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from benchmarks.measure.checks import check_local_run
from benchmarks.measure.launching.launchers import Mpirun
from benchmarks.measure.stragglers import report
from benchmarks.measure.stragglers.measurement import Plan, configure, list_contenders, measure
from benchmarks.records.options import RunOptions, make_parser, make_reader
from benchmarks.show import results
from mpiddp.errors import ConfigurationError
from mpiddp.training.options.groups.straggler import parse_straggler

READER = make_reader(
    command="stragglers",
    description="Train until an accuracy is reached while a worker is slow, in turns: the "
    "framework's all-reduce, of gradients and of weights every so many steps, and a parameter "
    "server with each bound on staleness.",
    groups={"what is measured": Plan, "the run": RunOptions},
    without=("warm_up", "nodes"),
)
parse = make_parser(READER, Plan)


def check(options: RunOptions[Plan]) -> Mpirun:
    plan = options.plan
    if plan.accuracy > 1:
        raise ConfigurationError(f"--accuracy: expected at most 1, found {plan.accuracy:g}")
    for straggler in plan.stragglers:
        rank = parse_straggler(straggler).rank
        if rank is not None and rank >= plan.ranks:
            raise ConfigurationError(
                f"--stragglers: expected ranks 0 to {plan.ranks - 1}, found {straggler!r}"
            )
    for contender in list_contenders(plan):
        configure(plan, contender)
    return check_local_run(options, plan.ranks)


def main(arguments: Sequence[str]) -> None:
    options = parse(arguments)
    launcher, plan = check(options), options.plan
    ranks = f"{plan.ranks} ranks, {plan.model} on digits"
    with results.open_output("stragglers", options, launcher, f"{ranks}\n") as output:
        found = measure(plan, launcher, partial(report.record_run, output.record))
        report.record_runs(output.record, found, plan)
        targets = report.judge(found, plan.accuracy) if options.targets else ()
        output.show(report.format_table(found, plan.accuracy), targets=targets)

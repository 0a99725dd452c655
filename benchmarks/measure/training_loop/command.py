"""``python -m benchmarks training-loop``: the trainer beside a bare hand-written loop.

Both train the same model on the same samples, with the same batch, precision and optimizer, in one
process (on each rank), in turns.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path

from benchmarks.measure.checks import check_local_run
from benchmarks.measure.launching.launchers import Mpirun
from benchmarks.measure.training_loop import report
from benchmarks.measure.training_loop.measurement import Group, Plan, measure
from benchmarks.measure.training_loop.workloads import find_workload
from benchmarks.records.options import RunOptions, make_parser, make_reader
from benchmarks.show import results

READER = make_reader(
    command="training-loop",
    description="Time the steps of python -m mpiddp.train and of a bare loop, which take turns in "
    "one process.",
    groups={"what is measured": Plan, "the run": RunOptions},
    without=("nodes",),
)
parse = make_parser(READER, Plan)


def check(options: RunOptions[Plan]) -> Mpirun:
    for model in options.plan.models:
        find_workload(model)
    return check_local_run(options, *options.plan.ranks)


def main(arguments: Sequence[str]) -> None:
    options = parse(arguments)
    launcher, plan = check(options), options.plan
    groups: list[Group] = []
    text = f"{report.EXPLANATION}\n"
    with (
        results.open_output("training-loop", options, launcher, text) as output,
        tempfile.TemporaryDirectory(prefix="mpiddp-bench-") as name,
    ):
        for ranks in plan.ranks:
            for group in measure(plan, ranks, launcher, Path(name)):
                for cell in report.make_cells(group, plan):
                    output.record.add(cell)
                groups.append(group)
        targets = report.judge(groups) if options.targets else ()
        output.show(report.format_table(groups), targets=targets)

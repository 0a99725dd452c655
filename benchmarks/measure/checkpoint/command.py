"""``python -m benchmarks checkpoint``: what checkpoints cost a training.

Steps and saves are timed apart, in turns within one job; a save's share is computed for an interval
between checkpoints. The difference between whole trainings would be less than their noise.
"""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.measure.checkpoint import report
from benchmarks.measure.checkpoint.measurement import Measurement, Plan, measure
from benchmarks.measure.checks import check_local_run
from benchmarks.measure.launching.launchers import Mpirun
from benchmarks.records.options import RunOptions, make_parser, make_reader
from benchmarks.records.workloads import parse_workload
from benchmarks.show import results
from mpiddp.errors import ConfigurationError

READER = make_reader(
    command="checkpoint",
    description="Time checkpoints, synchronous and beside training, against a raw write of their "
    "bytes, and by the time of the steps between two of them.",
    groups={"what is measured": Plan, "the run": RunOptions},
    without=("warm_up", "nodes"),
)
parse = make_parser(READER, Plan)


def check(options: RunOptions[Plan]) -> Mpirun:
    parse_workload(options.plan.model)
    directory = options.plan.directory
    if directory is not None and not directory.is_dir():
        raise ConfigurationError(f"--directory: {directory} is not a directory")
    return check_local_run(options, *options.plan.ranks)


def main(arguments: Sequence[str]) -> None:
    options = parse(arguments)
    launcher, plan = check(options), options.plan
    measured, text = list[Measurement](), f"{report.EXPLANATION}\n"
    with results.open_output("checkpoint", options, launcher, text) as output:
        for ranks in plan.ranks:
            found = measure(plan, ranks, launcher)
            report.record_measurement(output.record, found, plan)
            targets = report.judge(found, plan) if options.targets else ()
            output.show(report.format_table(found, plan), targets=targets)
            measured.append(found)

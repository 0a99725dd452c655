"""``python -m benchmarks checkpoint``: what checkpoints cost a training.

Steps and saves are timed apart, in turns within one job; a save's share is computed for an interval
between checkpoints. The difference between whole trainings would be less than their noise.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict

from benchmarks.checkpoint import report
from benchmarks.checkpoint.measurement import Plan, measure
from benchmarks.common import results
from benchmarks.common.checks import check_local_run
from benchmarks.common.options import RunOptions, make_reader, make_run
from benchmarks.common.targets import Target, format_targets
from benchmarks.common.workloads import parse_workload
from benchmarks.launching.launchers import Mpirun
from mpiddp.errors import ConfigurationError

READER = make_reader(
    command="checkpoint",
    description="Time checkpoints, synchronous and beside training, against a raw write of their "
    "bytes, and by the time of the steps between two of them.",
    groups={"what is measured": Plan, "the run": RunOptions},
    without=("warm_up", "nodes"),
)


def parse(arguments: Sequence[str]) -> RunOptions[Plan]:
    return make_run(READER.read(arguments), Plan)


def check(options: RunOptions[Plan]) -> Mpirun:
    parse_workload(options.plan.model)
    directory = options.plan.directory
    if directory is not None and not directory.is_dir():
        raise ConfigurationError(f"--directory: {directory} is not a directory")
    return check_local_run(options, *options.plan.ranks)


def main(arguments: Sequence[str]) -> None:
    options = parse(arguments)
    launcher, plan = check(options), options.plan
    environment, heading = results.begin(launcher, f"{report.EXPLANATION}\n")
    measured, targets = [], list[Target]()
    for ranks in plan.ranks:
        found = measure(plan, ranks, launcher)
        print(report.format_table(found, plan), flush=True)
        if options.targets:
            judged = report.judge(found, plan)
            print(format_targets(judged))
            targets += judged
        print()
        measured.append(found)
    results.write_measurement(
        options.json,
        "checkpoint",
        environment,
        targets if options.targets else None,
        plan={**asdict(plan), "directory": str(plan.directory or "")},
        measured=[asdict(found) for found in measured],
    )
    if options.plot is not None:
        report.draw(options.plot, measured, plan, heading)

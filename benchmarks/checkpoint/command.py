"""``python -m benchmarks checkpoint``: what checkpoints cost a training.

Steps and saves are timed apart, in turns within one job; a save's share is computed for an interval
between checkpoints. The difference between whole trainings would be less than their noise.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from benchmarks.checkpoint import report
from benchmarks.checkpoint.measurement import Plan, measure
from benchmarks.common import results
from benchmarks.common.checks import check_local_run
from benchmarks.common.options import CommandLine, RunOptions, at_least, make
from benchmarks.common.targets import Target, format_targets
from benchmarks.common.workloads import SHAPES, parse_workload
from benchmarks.launching.launchers import Mpirun
from mpiddp.errors import ConfigurationError


def parse(arguments: Sequence[str]) -> RunOptions[Plan]:
    parser = CommandLine(
        "checkpoint",
        "Time checkpoints, synchronous and beside training, against a raw write of their bytes, "
        "and by the time of the steps between two of them.",
    )
    add, count = parser.add, at_least(1)
    add("ranks", "numbers of ranks", default=(2,))
    add("model", f"{', '.join(SHAPES)} or mlp:megabytes=M", default="resnet18")
    add("batch-size", "samples per rank and step", type=count, default=64, metavar="N")
    add("save-every", "steps between two checkpoints", type=count, default=50, metavar="N")
    add("steps", "steps without a checkpoint in a round", type=count, default=2, metavar="N")
    add("directory", "where to write (default: the directory for temporary files)", type=Path,
        metavar="DIR")  # fmt: skip
    add("repetitions", default=5)
    add("seed", "seed of parameters, samples and the order")
    add("deadline", "time limit of a job", default=1800.0)
    parser.add_run("write every round and the environment", "draw the times", is_local=True)
    values = parser.read_values(arguments)
    return make(RunOptions, values, plan=make(Plan, values), nodes=None)


def check(options: RunOptions[Plan]) -> Mpirun:
    parse_workload(options.plan.model)
    directory = options.plan.directory
    if directory is not None and not directory.is_dir():
        raise ConfigurationError(f"--directory: {directory} is not a directory")
    return check_local_run(options)


def main(arguments: Sequence[str]) -> None:
    options = parse(arguments)
    launcher, plan = check(options), options.plan
    environment, heading = results.begin(launcher, f"{report.EXPLANATION}\n")
    measured, targets = [], list[Target]()
    for ranks in options.ranks:
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

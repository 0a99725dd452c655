"""``python -m benchmarks training-loop``: the trainer beside a bare hand-written loop.

Both train the same model on the same samples, with the same batch, precision, threads and
optimizer, in whole processes and in turns.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict

from benchmarks.common import results
from benchmarks.common.checks import check_local_run
from benchmarks.common.options import CommandLine, RunOptions, at_least, make
from benchmarks.common.targets import format_targets
from benchmarks.launching.launchers import Mpirun
from benchmarks.training_loop import report
from benchmarks.training_loop.measurement import Plan, measure
from benchmarks.training_loop.workloads import WORKLOADS, find_workload


def parse(arguments: Sequence[str]) -> RunOptions[Plan]:
    parser = CommandLine(
        "training-loop",
        "Time whole trainings of python -m mpiddp.train and of a bare loop, in turns, by the "
        "samples per second of their epochs.",
    )
    add = parser.add
    add("ranks", "numbers of ranks", default=(1, 2))
    add("models", ", ".join(WORKLOADS), nargs="+", default=tuple(WORKLOADS), metavar="MODEL")
    add("epochs", "of each training that count, after one that does not", type=at_least(1),
        default=5, metavar="N")  # fmt: skip
    add("precision", "of both loops", choices=("fp32", "bf16"), default="fp32")
    add("channels-last", "images lie in memory by pixels", action="store_true")
    add("compile", "torch.compile", action="store_true")
    add("repetitions", default=5)
    add("warm-up", default=0)
    add("seed", "seed of parameters, samples and the order")
    add("deadline", "time limit of a training", default=600.0)
    parser.add_run("write every round and the environment", "draw the speeds", is_local=True)
    values = parser.read_values(arguments)
    return make(RunOptions, values, plan=make(Plan, values), nodes=None)


def check(options: RunOptions[Plan]) -> Mpirun:
    for model in options.plan.models:
        find_workload(model)
    return check_local_run(options)


def main(arguments: Sequence[str]) -> None:
    options = parse(arguments)
    launcher, plan = check(options), options.plan
    environment, heading = results.begin(launcher, f"{report.EXPLANATION}\n")
    groups = [group for ranks in options.ranks for group in measure(plan, ranks, launcher)]
    targets = report.judge(groups) if options.targets else None
    print(report.format_table(groups))
    print(format_targets(targets or ()), end="\n" if targets else "")
    results.write_measurement(
        options.json,
        "training-loop",
        environment,
        targets,
        plan=asdict(plan),
        groups=[asdict(group) for group in groups],
    )
    if options.plot is not None:
        report.draw(options.plot, groups, heading)

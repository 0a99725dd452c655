"""``python -m benchmarks stragglers``: how long training takes while a worker is slow.

Whole trainings of ``python -m mpiddp.train``, in turns: the framework's all-reduce, and a parameter
server with each bound on staleness, for each kind of straggler. What counts is the time that
training itself took, up to the first epoch whose evaluation reached the accuracy; evaluations, and
the copy of the servers' weights to all ranks before each of them, are left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict

from benchmarks.common import results
from benchmarks.common.checks import check_local_run
from benchmarks.common.options import CommandLine, RunOptions, at_least, make, positive
from benchmarks.common.targets import format_targets
from benchmarks.launching.launchers import Mpirun
from benchmarks.stragglers import report
from benchmarks.stragglers.measurement import IN_STEP, Contender, Plan, configure, measure
from benchmarks.stragglers.plot import draw
from mpiddp.errors import ConfigurationError
from mpiddp.training.options.groups.straggler import RANDOM, parse_straggler
from mpiddp.training.options.groups.synchronisation import UNLIMITED


def parse(arguments: Sequence[str]) -> RunOptions[Plan]:
    parser = CommandLine(
        "stragglers",
        "Train until an accuracy is reached while a worker is slow: the framework's all-reduce, "
        "and a parameter server with each bound on staleness, in turns.",
    )
    add, count = parser.add, at_least(1)
    add("ranks", "number of ranks, all of them workers", type=at_least(2), nargs=None, default=2)
    add("model", "model of python -m mpiddp.train", default="convnet")
    add("epochs", type=count, default=8, metavar="N")
    add("batch-size", "samples per worker and step", type=count, default=16, metavar="N")
    add("accuracy", "share of the test samples to reach", type=positive("a share"), default=0.97,
        metavar="SHARE")  # fmt: skip
    add("stragglers", "a rank, or random, and how much longer its passes take", nargs="+",
        default=("0=4", f"{RANDOM}=4"), metavar="WHO=FACTOR")  # fmt: skip
    add("staleness", "bounds on staleness", nargs="+", default=(IN_STEP, "4", UNLIMITED),
        metavar="STEPS")  # fmt: skip
    add("repetitions", default=3)
    add("seed", "seed of the order, and of the first round's training")
    add("deadline", "time limit of a run", default=600.0)
    parser.add_run("write every run and the environment", "draw accuracy by time", is_local=True)
    values = parser.read_values(arguments)
    plan = make(Plan, values)
    return make(RunOptions, values, plan=plan, ranks=(plan.ranks,), nodes=None)


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
    for staleness in plan.staleness:
        configure(plan, Contender(plan.stragglers[0], staleness))
    return check_local_run(options)


def main(arguments: Sequence[str]) -> None:
    options = parse(arguments)
    launcher, plan = check(options), options.plan
    ranks = f"{plan.ranks} ranks, {plan.model} on digits"
    environment, heading = results.begin(launcher, f"{ranks}\n")
    found = measure(plan, launcher)
    targets = report.judge(found, plan.accuracy) if options.targets else None
    tables = report.format_table(found, plan.accuracy)
    print("\n\n".join(filter(None, [tables, format_targets(targets or ())])))
    results.write_measurement(
        options.json,
        "stragglers",
        environment,
        targets,
        ranks=plan.ranks,
        accuracy=plan.accuracy,
        runs=[
            {**asdict(contender), "rounds": [asdict(run) for run in series.samples]}
            for contender, series in found.items()
        ],
    )
    if options.plot is not None:
        draw(options.plot, found, plan.accuracy, f"{ranks}; {heading}")

"""``python -m benchmarks programs``: whole small programs, over mpiddp's backend and over Gloo.

What every program finds is checked before it is timed.
"""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.measure.checks import check_local_run
from benchmarks.measure.launching.launchers import Mpirun
from benchmarks.measure.programs import report
from benchmarks.measure.programs.measurement import Group, Plan, measure
from benchmarks.measure.trials import WrongResultError
from benchmarks.records.options import RunOptions, make_parser, make_reader
from benchmarks.show import results

READER = make_reader(
    command="programs",
    description="Time whole small programs of torch.distributed over mpiddp's backend and over "
    "Gloo, in turns in the same processes: tokens of a split transformer, training steps, object "
    "collectives.",
    groups={"what is measured": Plan, "the run": RunOptions},
    epilog=f"PROGRAM is {report.describe_programs()}",
    without=("link", "nodes"),
)
parse = make_parser(READER, Plan)


def check(options: RunOptions[Plan]) -> Mpirun:
    return check_local_run(options, *options.plan.ranks)


def main(arguments: Sequence[str]) -> None:
    options = parse(arguments)
    launcher, groups = check(options), list[Group]()
    text = f"{report.EXPLANATION}\n"
    with results.open_output("programs", options, launcher, text) as output:
        try:
            for ranks in options.plan.ranks:
                for group in measure(ranks, launcher, options.plan):
                    report.record_group(output.record, group)
                    groups.append(group)
        finally:
            # Whatever was measured before an interruption or an error.
            targets = report.judge(groups) if options.targets else ()
            output.show(report.format_table(groups), targets=targets)
    if wrong := report.list_wrong(groups):
        raise WrongResultError(f"wrong results: {'; '.join(wrong)}")

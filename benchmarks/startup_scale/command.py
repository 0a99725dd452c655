"""``python -m benchmarks startup-scale``: what start-up asks of rank 0, counted and predicted."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.common import results
from benchmarks.common.machines import describe_place
from benchmarks.common.options import RunOptions, make_reader, make_run
from benchmarks.common.trials import show_progress
from benchmarks.startup_scale import report
from benchmarks.startup_scale.measurement import (
    Plan,
    Starts,
    find_launchers,
    measure_starts,
)
from benchmarks.startup_scale.plot import draw
from mpiddp.options.outputs import PICTURE, check_outputs, find
from mpiddp.wording import print_text

READER = make_reader(
    command="startup-scale",
    description="Count rank 0's connections, messages and bytes in each stage of start-up, and its "
    "seconds; fit how they grow with the ranks, and predict them for a large job.",
    groups={"what is measured": Plan, "the run": RunOptions},
    without=("nodes", "targets"),
)


def main(arguments: Sequence[str]) -> None:
    options = make_run(READER.read(arguments), Plan)
    plan = options.plan
    check_outputs(options.output)
    launchers = find_launchers(options)
    places = {f"{ranks} on {nodes}": (launchers[nodes], ranks) for ranks, nodes in plan.places}
    starts: list[Starts] = []
    first = next(iter(launchers.values()))
    with results.open_output("startup-scale", options, first, places=places) as output:
        try:
            with show_progress(2 * plan.repetitions * len(plan.places), "start") as bar:
                for place in plan.places:
                    bar.set_description(describe_place(*place))
                    starts.append(measure_starts(launchers[place[1]], place, plan, bar.update))
                    for cell in starts[-1].list_cells():
                        output.record.add(cell)
        finally:
            # Whatever was measured before an interruption or an error.
            if starts:
                _show(starts, options, output)


def _show(starts: Sequence[Starts], options: RunOptions[Plan], output: results.Output) -> None:
    models, plan = report.fit_all(starts), options.plan
    for line in report.describe_models(models, plan.predicted):
        output.record.write("model", **line)
    print_text(report.format_report(starts, models, plan))
    for path in find(options.output, PICTURE):
        draw(path, starts, models, plan, output.heading)

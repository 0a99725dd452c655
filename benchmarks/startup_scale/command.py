"""``python -m benchmarks startup-scale``: what start-up asks of rank 0, counted and predicted."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.common import results
from benchmarks.common.checks import check_outputs
from benchmarks.common.options import make_reader
from benchmarks.common.records import RecordWriter, open_record
from benchmarks.common.trials import show_progress
from benchmarks.startup_scale import report
from benchmarks.startup_scale.measurement import (
    Plan,
    Starts,
    find_launchers,
    measure_starts,
)
from benchmarks.startup_scale.plot import draw
from mpiddp.options.fields import pick

READER = make_reader(
    command="startup-scale",
    description="Count rank 0's connections, messages and bytes in each stage of start-up, and its "
    "seconds; fit how they grow with the ranks, and predict them for a large job.",
    groups={"options": Plan},
)


def main(arguments: Sequence[str]) -> None:
    plan = pick(Plan, READER.read(arguments))
    check_outputs(plan.json, plot=plan.plot)
    launchers = find_launchers(plan)
    environment, heading = results.begin(next(iter(launchers.values())))
    total = 2 * plan.repetitions * len(plan.places)
    starts: list[Starts] = []
    with open_record(
        plan.json, "startup-scale", environment, results.describe_plan(plan)
    ) as record:
        try:
            with show_progress(total, "start") as bar:
                for place in plan.places:
                    bar.set_description(report.name_place(place))
                    starts.append(measure_starts(launchers[place[1]], place, plan, bar.update))
                    for cell in starts[-1].list_cells():
                        record.add(cell)
        finally:
            # Whatever was measured before an interruption or an error.
            if starts:
                _show(starts, plan, heading, record)


def _show(starts: Sequence[Starts], plan: Plan, heading: str, record: RecordWriter) -> None:
    models = report.fit_all(starts)
    for line in report.describe_models(models, plan.predicted):
        record.write("model", **line)
    print(report.format_report(starts, models, plan))
    if plan.plot is not None:
        draw(plan.plot, starts, models, plan, heading)

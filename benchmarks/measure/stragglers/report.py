"""The tables of ``python -m benchmarks stragglers``, and what this project promises of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from benchmarks.judge.ratios import compare_rounds, find_common
from benchmarks.judge.targets import Target
from benchmarks.measure.stragglers.measurement import (
    IN_STEP,
    Contender,
    Plan,
    TrainingRun,
    find_median,
    find_times,
)
from benchmarks.records.options import format_rows
from benchmarks.records.schema import Coordinate, RecordWriter, make_cell
from benchmarks.records.statistics import Series, quantile, summarize
from mpiddp.training.options.groups.straggler import parse_straggler
from mpiddp.training.options.groups.synchronisation import UNLIMITED
from mpiddp.wording import count_noun

CONSTANT_TARGET, RANDOM_TARGET = 0.5, 0.7
"""Most of the synchronous server's time that the asynchronous one may take with one slow worker,
and that a bounded one may take with a random one."""
TRAINING, TIME_TO = "training", "time to accuracy"
"""The quantities of a record."""


def format_table(found: Mapping[Contender, Series[TrainingRun]], accuracy: float) -> str:
    heads = ("seconds to it", "by in step", "seconds, all epochs", "last accuracy", "staleness")
    lines: list[str] = []
    for straggler in dict.fromkeys(each.straggler for each in found):
        base = found.get(Contender(straggler, IN_STEP))
        rows = [
            [f"  {contender.way}", *_format_row(series, base, accuracy)]
            for contender, series in found.items()
            if contender.straggler == straggler
        ]
        title = f"straggler {straggler}, to {100 * accuracy:g}%"
        lines += [*format_rows([[title, *heads], *rows]), ""]
    return "\n".join(line.rstrip() for line in lines).rstrip()


def _format_row(
    series: Series[TrainingRun], base: Series[TrainingRun] | None, accuracy: float
) -> list[str]:
    ours, theirs = (find_median(each, accuracy) for each in (series, base))
    ends = [run.points[-1] for run in series.samples]
    counts: Counter[int] = Counter()
    for run in series.samples:
        counts.update(run.staleness)
    mean = sum(late * times for late, times in counts.items()) / max(1, sum(counts.values()))
    return [
        "never" if ours is None else f"{ours:.2f}",
        f"{ours / theirs:.2f}" if ours is not None and theirs is not None else "",
        f"{summarize([each.seconds for each in ends]).median:.2f}",
        f"{summarize([each.accuracy for each in ends]).median:.2%}",
        f"mean {mean:.2f}, max {max(counts)}" if counts else "",
    ]


def record_run(record: RecordWriter, contender: Contender, run: TrainingRun) -> None:
    """A run as it ends: the cells come after the last round of all, which may be hours later."""
    seconds, straggler = run.points[-1].seconds, contender.straggler
    record.keep(TRAINING, contender.way, seconds, straggler=straggler)


def record_runs(
    record: RecordWriter, found: Mapping[Contender, Series[TrainingRun]], plan: Plan
) -> None:
    """Seconds of all epochs with the curves of accuracy, and seconds to the accuracy."""
    for contender, series in found.items():
        at: dict[str, Coordinate] = {
            "straggler": contender.straggler, "model": plan.model, "batch": plan.batch_size,
            "epochs": plan.epochs,
        }  # fmt: skip
        place: dict[str, Any] = {"contender": contender.way, "ranks": plan.ranks}
        runs = series.samples
        whole = [run.points[-1].seconds for run in runs]
        curves = [[(each.seconds, each.accuracy) for each in run.points] for run in runs]
        details = {"curves": curves, "staleness": [run.staleness for run in runs]}
        record.add(make_cell(whole, quantity=TRAINING, at=at, details=details, **place))
        times = [run.find_time(plan.accuracy) for run in runs]
        reached = [time for time in times if time is not None]
        at = {**at, "accuracy": plan.accuracy}
        if len(reached) == len(times):
            record.add(make_cell(reached, quantity=TIME_TO, at=at, **place))
        else:
            missed = f"{len(times) - len(reached)} of {count_noun(len(times), 'run')}"
            reason = f"{missed} did not reach {100 * plan.accuracy:g}%"
            record.fail(TIME_TO, contender.way, reason, ranks=plan.ranks, **at)


def judge(found: Mapping[Contender, Series[TrainingRun]], accuracy: float) -> list[Target]:
    """The targets that these runs say something about; ratios are those of rounds; that of
    the medians stands beside them."""
    reached = (find_times(series, accuracy) for series in found.values())
    coefficient = find_common([list(filter(None, reached))])
    targets = []
    for contender, series in found.items():
        base = found.get(Contender(contender.straggler, IN_STEP))
        is_random = parse_straggler(contender.straggler).rank is None
        bounded = contender.staleness not in (None, IN_STEP, UNLIMITED)
        if base is None or (not bounded if is_random else contender.staleness != UNLIMITED):
            continue
        ours, theirs = (find_times(each, accuracy) for each in (series, base))
        ratio, note = None, ""
        if ours is not None and theirs is not None:
            ratio = compare_rounds(theirs, ours, coefficient)
            note = f"of medians {quantile(ours, 0.5) / quantile(theirs, 0.5):.3f}"
        limit = RANDOM_TARGET if is_random else CONSTANT_TARGET
        text = f"straggler {contender.straggler}: time of {contender.way} to {100 * accuracy:g}%"
        text += f", by in step, at most {limit:g}"
        targets.append(Target(text, {"": ratio}, at_most=limit, note=note))
    return targets

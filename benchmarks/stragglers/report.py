"""The tables of ``python -m benchmarks stragglers``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from benchmarks.common.statistics import Series, summarize
from benchmarks.stragglers.measurement import IN_STEP, Contender, TrainingRun, find_median


def format_table(found: Mapping[Contender, Series[TrainingRun]], accuracy: float) -> str:
    heads = ("seconds to it", "by in step", "seconds, all epochs", "last accuracy", "staleness")
    lines = []
    for straggler in dict.fromkeys(each.straggler for each in found):
        title = f"straggler {straggler}, to {100 * accuracy:g}%"
        lines.append(f"{title:<26}" + "".join(f"{head:>21}" for head in heads))
        base = found.get(Contender(straggler, IN_STEP))
        for contender, series in found.items():
            if contender.straggler == straggler:
                cells = _format_row(series, base, accuracy)
                lines.append(f"  {contender.way:<24}" + "".join(f"{each:>21}" for each in cells))
        lines.append("")
    return "\n".join(lines).rstrip()


def _format_row(
    series: Series[TrainingRun], base: Series[TrainingRun] | None, accuracy: float
) -> list[str]:
    ours = find_median(series, accuracy)
    theirs = None if base is None else find_median(base, accuracy)
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

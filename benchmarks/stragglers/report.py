"""The tables of ``python -m benchmarks stragglers``, and what this project promises of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from benchmarks.common.statistics import Series, summarize
from benchmarks.common.targets import Target
from benchmarks.stragglers.measurement import IN_STEP, Contender, TrainingRun, find_median
from mpiddp.training.options.groups.straggler import parse_straggler
from mpiddp.training.options.groups.synchronisation import UNLIMITED

CONSTANT_TARGET, RANDOM_TARGET = 0.5, 0.7
"""Most of the synchronous server's time that the asynchronous one may take with one slow worker,
and that a bounded one may take with a random one."""


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


def judge(found: Mapping[Contender, Series[TrainingRun]], accuracy: float) -> list[Target]:
    """The targets that these runs say something about; ratios are of medians."""
    targets = []
    for contender, series in found.items():
        base = found.get(Contender(contender.straggler, IN_STEP))
        is_random = parse_straggler(contender.straggler).rank is None
        bounded = contender.staleness not in (None, IN_STEP, UNLIMITED)
        if base is None or (not bounded if is_random else contender.staleness != UNLIMITED):
            continue
        ours, theirs = find_median(series, accuracy), find_median(base, accuracy)
        ratio = None if ours is None or theirs is None else ours / theirs
        limit = RANDOM_TARGET if is_random else CONSTANT_TARGET
        text = f"straggler {contender.straggler}: time of {contender.way} to {100 * accuracy:g}%"
        text += f", by in step, at most {limit:g}"
        targets.append(Target(text, {"": ratio}, at_most=limit))
    return targets

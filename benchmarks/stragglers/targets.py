"""What this project promises of training with a straggler, and what was measured of it."""

from __future__ import annotations

from collections.abc import Mapping

from benchmarks.common.statistics import Series
from benchmarks.common.targets import Target
from benchmarks.stragglers.measurement import IN_STEP, Contender, TrainingRun, find_median
from mpiddp.training.config import UNLIMITED
from mpiddp.training.straggler import parse_straggler

CONSTANT_TARGET, RANDOM_TARGET = 0.5, 0.7
"""Most of the synchronous server's time that the asynchronous one may take with one slow worker,
and that a bounded one may take with a random one."""


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

"""The table of ``python -m benchmarks training-loop``."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.common.options import format_rows
from benchmarks.common.statistics import summarize
from benchmarks.training_loop.measurement import BARE, TRAINER, Group

EXPLANATION = """\
Samples per second of all ranks: medians over rounds, each of them a whole training's median epoch.
Speed: the trainer's by the bare loop's, round by round. Batches are samples per rank."""


def format_table(groups: Sequence[Group]) -> str:
    rows = [["model", "ranks", "batch", TRAINER, BARE, "speed", "quartiles"]]
    for group in groups:
        speed = group.speed
        rates = (summarize(group.series[name].samples).median for name in (TRAINER, BARE))
        rows.append(
            [
                group.model,
                str(group.ranks),
                str(group.batch_size),
                *(f"{rate:,.4g}" for rate in rates),
                f"{speed.median:.3f}",
                f"{speed.lower_quartile:.3f}–{speed.upper_quartile:.3f}",
            ]
        )
    return "\n".join(format_rows(rows))

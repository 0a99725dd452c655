"""What this project promises of the trainer's loop, and what was measured of it."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.common.targets import Target
from benchmarks.training_loop.measurement import Group
from mpiddp.wording import count_noun

SPEED = 0.98


def judge(groups: Sequence[Group]) -> list[Target]:
    return [
        Target(
            f"the trainer's samples per second: at least {SPEED:g} × a bare loop's",
            {
                f"{each.model}, {count_noun(each.ranks, 'rank')}": each.speed.median
                for each in groups
            },
            at_least=SPEED,
        )
    ]

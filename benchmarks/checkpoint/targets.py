"""What this project promises of checkpoints, and what was measured of it."""

from __future__ import annotations

from benchmarks.checkpoint.measurement import Measurement, Plan
from benchmarks.common.targets import Target

SYNCHRONOUS, ASYNCHRONOUS, OVER_RAW, AGREEMENT = 0.035, 0.01, 1.5, 0.01


LEAST_BYTES = 64 << 20
"""Smaller checkpoints take what their files' names and lists take, which grows with no bytes."""


def judge(found: Measurement, plan: Plan) -> list[Target]:
    every = f"a checkpoint every {plan.save_every} steps"
    over_raw = Target(
        f"a synchronous save: at most {OVER_RAW:g} × the raw write and flush",
        {"": found.over_raw},
        at_most=OVER_RAW,
    )
    return [
        Target(
            f"{every}, synchronous: at most {SYNCHRONOUS:.1%} of training time",
            {"": found.find_share("synchronous", plan.save_every)},
            at_most=SYNCHRONOUS,
        ),
        Target(
            f"{every}, asynchronous: at most {ASYNCHRONOUS:.0%} of training time",
            {"": found.find_share("asynchronous", plan.save_every)},
            at_most=ASYNCHRONOUS,
        ),
        *([over_raw] if found.file_bytes >= LEAST_BYTES else []),
        Target(
            f"agreeing on signals: at most {AGREEMENT:.0%} of a step",
            {"": found.agreement_share},
            at_most=AGREEMENT,
        ),
    ]

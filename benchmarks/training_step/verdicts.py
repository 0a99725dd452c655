"""Whether what ranks found after a few steps is what `checks` expects."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

STEPS = 2
"""Of a check. The second one moves by what the first one left in the optimizer, too."""
TOLERANCE, NARROW_TOLERANCE = 0.02, 0.1
"""How far off the way may be, relative to its length; where gradients travel in 16 bits, which
rounds them to 8 or 11 of them and loses the smallest."""


def judge(
    answers: Sequence[Mapping[str, Any]], expected: Sequence[float] | None, *, is_narrow: bool
) -> str:
    """Why ranks' answers to a check are wrong; empty if they are not.

    Ranks without an answer took no part. ``expected`` is the way of one process, None where
    workers go at their own pace.
    """
    known = [answer for answer in answers if answer]
    if len({answer["digest"] for answer in known}) > 1:
        return "the ranks' parameters differ"
    way = known[0]["sample"]
    if not all(map(math.isfinite, way)):
        return "parameters are not finite"
    if expected is None:
        return "" if any(way) else "the parameters have not moved"
    error = math.dist(way, expected) / max(math.hypot(*expected), 1e-30)
    tolerance = NARROW_TOLERANCE if is_narrow else TOLERANCE
    if error <= tolerance:
        return ""
    return (
        f"after {STEPS} steps the parameters are off by {error:.2g} of the way that one process "
        f"with all samples takes them; up to {tolerance:g} would be rounding"
    )

"""``--save-every``: when a checkpoint is due."""

from __future__ import annotations

import re
from dataclasses import dataclass

from mpiddp.errors import ConfigurationError

NEVER = "never"


@dataclass(frozen=True)
class Interval:
    """Between two checkpoints; what is None does not count."""

    steps: int | None = None
    epochs: int | None = None
    seconds: float | None = None


def parse_interval(text: str) -> Interval | None:
    """The interval that ``500steps``, ``10epochs`` or ``15min`` means; None for ``never``.

    Raises ConfigurationError.
    """
    if text == NEVER:
        return None
    match = re.fullmatch(r"(\d+) ?(steps?|epochs?|min)", text)
    if match is None or int(match[1]) == 0:
        raise ConfigurationError(
            f"save_every: expected, for example, 500steps, 10epochs, 15min or never, found {text!r}"
        )
    number, unit = int(match[1]), match[2]
    if unit == "min":
        return Interval(seconds=60.0 * number)
    return Interval(steps=number) if unit.startswith("step") else Interval(epochs=number)

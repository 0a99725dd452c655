"""What an option means for a run that goes on from a checkpoint; a mark in the option's type.

An option without a mark decides the result, and may change between two attempts.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields
from enum import Enum
from typing import Any, get_type_hints

from mpiddp.launch.options import Options


class Effect(Enum):
    """Of an option."""

    FIXED = "the state belongs to this value: it must stay"
    FREE = "the numbers are the same with any value"


FIXED, FREE = Effect.FIXED, Effect.FREE


def list_options(kind: type[Any], effect: Effect) -> Iterator[str]:
    """The names of a dataclass's options that have this mark.

    How ranks are started, and where they print, changes no number.
    """
    of_launch = {each.name for each in fields(Options)}
    for name, hint in get_type_hints(kind, include_extras=True).items():
        found = FREE if name in of_launch else None
        if effect in (found, *getattr(hint, "__metadata__", ())):
            yield name

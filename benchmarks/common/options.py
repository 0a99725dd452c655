"""Readers of option values that several commands share."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Sequence

from mpiddp.schedules.registry import Choice, find, names, parse

ITEM = 4
"""Bytes of an element, float32, in buffers that are priced."""

SCALES = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


def at_least(minimum: int, maximum: int | None = None) -> Callable[[str], int]:
    """A reader of integers that are not below ``minimum``, nor above ``maximum``."""

    def read(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = minimum - 1
        if value < minimum:
            raise argparse.ArgumentTypeError(f"expected an integer >= {minimum}, found {text!r}")
        if maximum is not None and value > maximum:
            raise argparse.ArgumentTypeError(f"expected an integer <= {maximum}, found {text!r}")
        return value

    return read


def positive(unit: str, *, zero: bool = False) -> Callable[[str], float]:
    """A reader of numbers from 1e-9 to 1e12, or of 0 as well."""

    def read(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = -1.0
        if not (value >= 1e-9 or (zero and value == 0)):
            least = ">= 0" if zero else "> 0"
            raise argparse.ArgumentTypeError(f"expected {unit} {least}, found {text!r}")
        if value > 1e12:
            raise argparse.ArgumentTypeError(f"expected {unit} <= 1e12, found {text!r}")
        return value

    return read


def size(text: str) -> int:
    """Bytes: an integer, or one with K, M or G for 2^10, 2^20, 2^30, as nccl-tests has it.

    Whole elements of ITEM bytes.
    """
    found = re.fullmatch(r"(\d+)([KMG]?)(?:i?B)?", text, re.IGNORECASE)
    count = int(found[1]) * SCALES[found[2].upper()] if found else -1
    if not 0 <= count < 1 << 60:
        raise argparse.ArgumentTypeError(f"expected bytes, as 4096, 64K or 16M, found {text!r}")
    if count % ITEM:
        raise argparse.ArgumentTypeError(
            f"expected whole elements of {ITEM} bytes (float32), found {text!r}"
        )
    return count


def add_algorithms(parser: argparse.ArgumentParser) -> None:
    """The algorithms to work on, all of them if none is named."""
    parser.add_argument(
        "algorithms", type=parse, nargs="*", metavar="ALGORITHM", help="default: all"
    )
    # Behind an option that takes several values, they would be taken for some of these.
    parser.usage = "%(prog)s [ALGORITHM …] [OPTION …]"
    parser.epilog = describe_algorithms("ring:segments=4")


def read_algorithms(chosen: Sequence[Choice]) -> tuple[Choice, ...]:
    """Those that were named, each once; or all."""
    named = {str(choice): choice for choice in chosen}
    return tuple(named.values()) or tuple(Choice(find(name)) for name in names())


def describe_algorithms(example: str) -> str:
    """What ALGORITHM may be."""
    return f"ALGORITHM is one of {', '.join(names())}; with parameters as in {example}."


def describe_size(count: int) -> str:
    """Four figures and a unit."""
    for unit in ("G", "M", "K"):
        if count >= SCALES[unit]:
            return f"{count / SCALES[unit]:.4g} {unit}iB"
    return f"{count} B"


def describe_seconds(seconds: float) -> str:
    """Three figures and a unit."""
    # Rounded first, or 999.9 µs would be 1e+03 of them.
    rounded = float(f"{seconds:.3g}")
    if rounded >= 1000:
        return f"{seconds:,.0f} s"
    scale, unit = next(
        (pair for pair in ((1.0, "s"), (1e-3, "ms")) if rounded >= pair[0]), (1e-6, "µs")
    )
    return f"{rounded / scale:.3g} {unit}"

"""Readers of option values that several commands share."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable

SCALES = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


def at_least(minimum: int) -> Callable[[str], int]:
    """A reader of integers that are not below ``minimum``."""

    def read(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = minimum - 1
        if value < minimum:
            raise argparse.ArgumentTypeError(f"expected an integer >= {minimum}, found {text!r}")
        return value

    return read


def positive(unit: str, *, zero: bool = False) -> Callable[[str], float]:
    """A reader of finite numbers above 0, or from 0 on."""

    def read(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = -1.0
        if not (0 < value < float("inf") or (zero and value == 0)):
            least = ">= 0" if zero else "> 0"
            raise argparse.ArgumentTypeError(f"expected {unit} {least}, found {text!r}")
        return value

    return read


def size(text: str) -> int:
    """Bytes: an integer, or one with K, M or G for 2^10, 2^20, 2^30, as nccl-tests has it."""
    found = re.fullmatch(r"(\d+)([KMG]?)(?:i?B)?", text, re.IGNORECASE)
    if found is None:
        raise argparse.ArgumentTypeError(f"expected bytes, as 4096, 64K or 16M, found {text!r}")
    return int(found[1]) * SCALES[found[2].upper()]


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

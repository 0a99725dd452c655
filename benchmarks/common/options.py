"""The options that several commands share, each defined once, and readers of their values."""

from __future__ import annotations

import argparse
import dataclasses
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

from benchmarks.launching.srun import is_srun
from mpiddp.launch.script.arguments import Parser
from mpiddp.schedules.registry import Choice, find, names, parse

T = TypeVar("T")

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
    """Bytes: an integer, or one with K, M or G for 2^10, 2^20, 2^30, as in nccl-tests.

    Whole elements of ITEM bytes.
    """
    found = re.fullmatch(r"(\d+)([KMG]?)(?:i?B)?", text, re.IGNORECASE)
    count = int(found[1]) * SCALES[found[2].upper()] if found else -1
    if not 0 <= count < 1 << 60:
        raise argparse.ArgumentTypeError(
            f"expected bytes, for example 4096, 64K or 16M, found {text!r}"
        )
    if count % ITEM:
        raise argparse.ArgumentTypeError(
            f"expected whole elements of {ITEM} bytes (float32), found {text!r}"
        )
    return count


MPIRUN = "mpirun to use (default: MPIDDP_MPIRUN, or this Python's, or the first in PATH)"
SHARED: Mapping[str, Mapping[str, Any]] = {
    "ranks": {"type": at_least(1), "nargs": "+", "metavar": "N"},
    "repetitions": {"type": at_least(1), "metavar": "N", "help": "measured rounds"},
    "warm-up": {"type": at_least(0), "metavar": "N", "help": "rounds before them"},
    "iterations": {"type": at_least(1), "metavar": "N"},
    "seed": {"type": at_least(0), "default": 0, "metavar": "N"},
    "deadline": {"type": positive("seconds"), "metavar": "SECONDS"},
    "launcher": {"metavar": "PROGRAM"},
    "nodes": {"type": at_least(1), "metavar": "N", "help": "with srun: nodes to spread the ranks "
              "over evenly (default: the allocation's or cluster's, if they divide --ranks)"},
    "link": {"action": "store_true"},
    "targets": {"action": "store_true", "help": "print the project's targets, and which are met"},
    "json": {"type": Path, "metavar": "FILE"},
    "plot": {"type": Path, "metavar": "FILE"},
}  # fmt: skip
"""The arguments of ``add_argument`` for the options that several commands have."""


class CommandLine(Parser):
    """The options of one command; their help says the defaults."""

    def __init__(self, command: str, description: str, epilog: str | None = None) -> None:
        super().__init__(
            prog=f"python -m benchmarks {command}",
            description=description,
            epilog=epilog,
            allow_abbrev=False,
        )

    def add(self, name: str, about: str = "", **changes: Any) -> None:
        """An option; one of SHARED begins with the settings there."""
        settings = {"help": about, **SHARED.get(name, {}), **changes}
        text, default = about or settings["help"], settings.get("default")
        if default is not None and "default" not in text:
            shown = " ".join(map(str, default)) if isinstance(default, tuple) else default
            shown = f"default: {shown:g}" if isinstance(shown, float) else f"default: {shown}"
            text = f"{text} ({shown})" if text else shown
        self.add_argument(f"--{name}", **{**settings, "help": text})

    def add_run(self, json: str, plot: str, link: str = "", *, is_local: bool = False) -> None:
        """The options of RunOptions, but for ``ranks``; ``--link`` as well if it has a help.

        ``is_local``: the ranks are on this machine, so srun and ``--nodes`` are left out.
        """
        self.add("launcher", MPIRUN if is_local else f"{MPIRUN}, or srun")
        if not is_local:
            self.add("nodes")
        if link:
            self.add("link", link)
        self.add("targets")
        self.add("json", json)
        self.add("plot", f"{plot} (.svg, .png or .pdf)")

    def add_algorithms(self) -> None:
        """The algorithms to work on; ``read_values`` returns all if none is given."""
        self.add_argument(
            "algorithms", type=parse, nargs="*", metavar="ALGORITHM", help="default: all"
        )
        # After an option that takes several values, they would be taken for some of these.
        self.usage = "%(prog)s [ALGORITHM …] [OPTION …]"
        self.epilog = describe_algorithms("ring:segments=4")

    def read_values(self, arguments: Sequence[str]) -> dict[str, Any]:
        """The values by name; several values of one option as a tuple without repetitions.

        Raises ConfigurationError; SystemExit(0) after ``--help``.
        """
        values = vars(self.parse_args(arguments))
        for name, value in values.items():
            if isinstance(value, list | tuple):
                values[name] = tuple({str(each): each for each in value}.values())
        if values.get("algorithms") == ():
            values["algorithms"] = tuple(Choice(find(name)) for name in names())
        return values


def make(kind: type[T], values: Mapping[str, Any], **changes: Any) -> T:
    """The dataclass ``kind`` of those values whose names are its fields'."""
    # That T is a dataclass cannot be said in types.
    fields = {field.name for field in dataclasses.fields(kind)}  # type: ignore[arg-type]
    merged = {**values, **changes}
    return kind(**{name: value for name, value in merged.items() if name in fields})


@dataclass(frozen=True, kw_only=True)
class RunOptions(Generic[T]):
    """What is measured, where ranks are started, and where the results go."""

    plan: T
    ranks: tuple[int, ...]
    launcher: str | None
    nodes: int | None
    """Of a cluster; None for as many as there are, or without one."""
    targets: bool
    json: Path | None
    plot: Path | None


def make_run(
    values: Mapping[str, Any], plan: T, usual: tuple[int, ...], on_cluster: tuple[int, ...]
) -> RunOptions[T]:
    """``usual``, ``on_cluster``: numbers of ranks if none are given, here and under srun."""
    ranks = values["ranks"] or (on_cluster if is_srun(values["launcher"]) else usual)
    return make(RunOptions, values, plan=plan, ranks=ranks)


def describe_algorithms(example: str) -> str:
    return f"ALGORITHM is one of {', '.join(names())}; with parameters, for example {example}."


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


def format_rows(rows: Sequence[Sequence[str]]) -> list[str]:
    """The rows of a table as lines: the first column to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]) for row in rows
    ]

"""The options that several commands share, each defined once, and readers of their values."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from textwrap import fill
from typing import Annotated, Any, Generic, TypeVar

from benchmarks.records.environment import PROGRAM
from benchmarks.records.statistics import Interval
from mpiddp.launch.script.other_words import explain, find_flags
from mpiddp.options.checks import at_least, positive
from mpiddp.options.fields import Argument, pick
from mpiddp.options.outputs import PICTURE, RECORD, TABLE, Outputs, writes
from mpiddp.options.reader import Reader
from mpiddp.schedules.plans.loading import load
from mpiddp.schedules.registry import Choice, find, names, parse

T = TypeVar("T")

ITEM = 4
"""Bytes of an element, float32, in buffers that are priced."""

SECONDS, RATE, SPEED, SHARE = "s", "GB/s", "×", "%"
"""Units of values: seconds, 1e9 bytes per second, times as fast, and a part of 1, shown as %."""
SCALES = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


def read_bytes(text: str) -> int:
    """Bytes: an integer, or one with K, M or G for 2^10, 2^20, 2^30, as in nccl-tests."""
    found = re.fullmatch(r"(\d+)([KMG]?)(?:i?B)?", text, re.IGNORECASE)
    count = int(found[1]) * SCALES[found[2].upper()] if found else -1
    if not 0 <= count < 1 << 60:
        raise ValueError(f"expected bytes, for example 4096, 64K or 16M, found {text!r}")
    return count


def size(text: str) -> int:
    """A number of bytes in the form of ``read_bytes`` that is a multiple of ITEM."""
    count = read_bytes(text)
    if count % ITEM:
        raise ValueError(f"expected whole elements of {ITEM} bytes (float32), found {text!r}")
    return count


def load_file(text: str) -> str:
    """The name of a file whose algorithms are registered now. Raises MpiddpError."""
    load(Path(text))
    return text


def read_sizes(text: str) -> tuple[int, ...]:
    """One size of at least a byte, or ``FROM:TO:xFACTOR``: FROM, and FACTOR times that up to TO."""
    first, *rest = text.split(":")
    step = re.fullmatch(r"[x×](\d+)", rest[1]) if len(rest) == 2 else None
    factor = 2 if len(rest) == 1 else int(step[1]) if step else 1
    if len(rest) > 2 or (rest and factor < 2):
        raise ValueError(f"expected bytes or FROM:TO:xFACTOR, as in 1K:256M:x2, found {text!r}")
    low, high = read_bytes(first), read_bytes(rest[0] if rest else first)
    if not 1 <= low <= high:
        raise ValueError(f"expected sizes of at least a byte that rise, found {text!r}")
    found = [low]
    while rest and found[-1] * factor <= high:
        found.append(found[-1] * factor)
    return tuple(found)


TIMES = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6, "ns": 1e-9}
"""In seconds."""
RATES = {
    f"{prefix}{unit}{per}": factor * scale
    for prefix, factor in {"": 1.0, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}.items()
    for unit, scale in {"bit": 1.0, "B": 8.0}.items()
    for per in ("", "/s")
}
"""In bits per second."""


def in_words(
    unit: str, units: Mapping[str, float], *, zero: bool = False
) -> Callable[[str], float]:
    """A reader of numbers of ``unit``, with one of ``units`` or without: ``5``, ``5us``, ``5 us``.

    ``zero``: whether 0 is allowed.
    """
    read = positive(unit, zero=zero)

    def convert(text: str) -> float:
        number = re.sub(r"\s*[^\W\d_]*(?:/s)?$", "", text)
        word = text[len(number) :].strip()
        if word and word not in units:
            known = ", ".join(name for name in units if "/" not in name)
            raise ValueError(f"expected {unit}, or a number with one of {known}, found {text!r}")
        return read(number) * (units[word] / units[unit] if word else 1)

    return convert


Count = Annotated[int, Argument("N", at_least(1))]
CountOrZero = Annotated[int, Argument("N", at_least(0))]
Seconds = Annotated[float, Argument("SECONDS", positive("seconds"))]
File = Annotated[Path | None, Argument("FILE")]
Ranks = Annotated[tuple[int, ...], Argument("N", at_least(1))]
SeveralRanks = Annotated[tuple[int, ...], Argument("N", at_least(2))]
Sizes = Annotated[tuple[int, ...], Argument("BYTES", size)]
Load = Annotated[tuple[str, ...], Argument("FILE", load_file, is_first=True)]
SizeRanges = Annotated[tuple[tuple[int, ...], ...], Argument("SIZE", read_sizes)]
"""Each word a size or a range of sizes; ``chain.from_iterable`` makes them one list."""
Algorithms = Annotated[tuple[Choice, ...], Argument("ALGORITHM", parse, is_positional=True)]


@dataclass(frozen=True, kw_only=True)
class RunOptions(Generic[T]):
    """Where ranks are started, and where the results go."""

    plan: T
    """What is measured."""

    launcher: Annotated[str | None, Argument("PROGRAM")] = None
    """mpirun to use, or srun, which stragglers, training-loop and checkpoint do not take (default:
    MPIDDP_MPIRUN, or this Python's, or the first in PATH)."""

    nodes: Annotated[int | None, Argument("N", at_least(1))] = None
    """With srun: nodes to spread the ranks over evenly (default: the allocation's or cluster's, if
    they divide --ranks)."""

    targets: bool = False
    """Print the project's targets, and which are met."""

    output: Annotated[Outputs, writes(RECORD, TABLE, PICTURE)] = ()
    """Write what was measured."""

    hosts: bool = False
    """Write into the record the nodes' names, and which ranks were where."""

    def choose_ranks(
        self, given: tuple[int, ...], here: tuple[int, ...], on_cluster: tuple[int, ...]
    ) -> tuple[int, ...]:
        """Those that were given; else the usual ones on this machine, or under srun."""
        return given or (on_cluster if is_srun(self.launcher) else here)


OTHER_OPTIONS: Mapping[str, Mapping[str, str]] = {
    "launchers": {
        "`-n N`, `-np N`, `--np N`, `--nproc N`, `--nproc-per-node N`, `--ntasks N`, "
        "`--num-processes N`, `--num-gpus N`, `--nranks N`": "`--ranks N`"
    },
    "nccl-tests": {
        "`-b SIZE`, `--minbytes SIZE`, `-e SIZE`, `--maxbytes SIZE`, `-f N`, `--stepfactor N`, "
        "`-i SIZE`, `--stepbytes SIZE`": "`--sizes FROM:TO:xFACTOR`, as in 8:128M:x2",
        "`-g N`, `--ngpus N`, `-t N`, `--nthreads N`": "`--ranks N`",
        "`-n N`, `--iters N`": "`--iterations N`",
        "`-w N`, `--warmup-iters N`": "`--warm-up N`",
        "`-d TYPE`, `--datatype TYPE`": "`--types TYPE`",
        "`--op NAME`": "`--operators NAME`",
        "`-T SECONDS`, `--timeout SECONDS`": "`--deadline SECONDS`",
        "`-c N`, `--check N`": "nothing: every result is checked",
    },
    "OSU's benchmarks": {
        "`-m FROM:TO`, `--message-size FROM:TO`": "`--sizes FROM:TO:xFACTOR`, as in 8:128M:x2",
        "`-i N`": "`--iterations N`",
        "`-x N`, `--warmup N`": "`--warm-up N`",
        "`-T TYPE`, `--type TYPE`": "`--types TYPE`",
        "`-f`, `--full`": "`--output FILE.csv`",
        "`-c`, `--validation`": "nothing: every result is checked",
    },
}
"""By those who have them; each row in Markdown, as in `mpiddp.launch.script.other_words`."""
CHECKED = {"--iterations"}
"""What a command has that times, and so checks, results: for it are the rows without an option."""


def make_reader(
    command: str,
    description: str,
    groups: Mapping[str, type[Any]],
    epilog: str = "",
    without: tuple[str, ...] = (),
) -> Reader:
    """The reader of one benchmark's options; ``without``: fields that are none of it."""
    names = {name for kind in groups.values() for name in kind.__dataclass_fields__} - {*without}
    flags = {"--" + name.replace("_", "-") for name in names}
    rows = {
        owner: {
            options: text
            for options, text in rows.items()
            if flags >= (find_flags(text) or CHECKED)
        }
        for owner, rows in OTHER_OPTIONS.items()
    }
    return Reader(
        program=f"{PROGRAM} {command}",
        description=fill(description, break_on_hyphens=False),
        groups=groups,
        epilog=fill(epilog, break_on_hyphens=False),
        without=("plan", *without),
        explain=partial(explain, rows=rows),
    )


def make_model_reader(command: str, description: str, kind: type[Any], example: str) -> Reader:
    """The reader of a command about algorithms alone; ``example``: one with parameters."""
    return make_reader(command, description, {"options": kind}, describe_algorithms(example))


def list_algorithms() -> tuple[Choice, ...]:
    """All of the registry."""
    return tuple(Choice(find(name)) for name in names())


def make_run(values: Mapping[str, Any], plan: type[T]) -> RunOptions[T]:
    return pick(RunOptions, {**values, "plan": pick(plan, values)})


def describe_algorithms(example: str) -> str:
    return f"ALGORITHM is one of {', '.join(names())}; with parameters, for example {example}."


def describe_seconds(seconds: float) -> str:
    """Three figures and a unit."""
    # Rounded first, or 999.9 µs would be 1e+03 of them.
    rounded = float(f"{seconds:.3g}")
    if rounded >= 1000:
        return f"{seconds:,.0f} s"
    units = ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"))
    scale, unit = next((each for each in units if rounded >= each[0]), units[-1])
    return f"{rounded / scale:.3g} {unit}"


def describe_value(value: float, unit: str) -> str:
    """Three figures and the unit."""
    if unit == SECONDS:
        return describe_seconds(value) if value >= 0 else f"-{describe_seconds(-value)}"
    if unit == SHARE:
        return f"{value:.0%}"
    return f"{describe_number(value)} {'×' if unit == SPEED else unit}"


def describe_number(value: float) -> str:
    """Three figures, or all before the point: 999.9 is 1,000, not 1e+03."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def describe_interval(
    interval: Interval | None, describe: Callable[[float], str] = "{:.3f}".format
) -> str:
    """Both ends, each in the words of ``describe``; a dash if there is none."""
    return f"{describe(interval.low)}–{describe(interval.high)}" if interval else "–"


def format_rows(rows: Sequence[Sequence[str]]) -> list[str]:
    """The rows of a table as lines: the first column to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]) for row in rows
    ]


def is_srun(wanted: str | None) -> bool:
    return wanted is not None and Path(wanted).name == "srun"

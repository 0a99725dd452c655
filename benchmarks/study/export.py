"""``python -m benchmarks export ALGORITHM``: an all-reduce in the formats of other projects."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from benchmarks.records.machines import GIGABYTE, AdditionRate
from benchmarks.records.options import ITEM, Count, Load, make_model_reader, size
from mpiddp.files import write_whole
from mpiddp.options.checks import at_least
from mpiddp.options.fields import Argument, pick
from mpiddp.options.outputs import Kind, Output, Outputs, check_outputs, writes
from mpiddp.schedules.cost import split
from mpiddp.schedules.plans.msccl_writer import write_xml
from mpiddp.schedules.plans.mscclpp_writer import write_json
from mpiddp.schedules.plans.traces import write_chakra, write_goal
from mpiddp.schedules.registry import Choice, parse
from mpiddp.schedules.schedule import Schedule
from mpiddp.wording import count_noun, describe_size, print_text

MSCCL = Kind("MSCCL's plan", (".xml",))
MSCCLPP = Kind("MSCCL++'s execution plan", (".json",))
CHAKRA = Kind("a trace for ASTRA-sim: NAME.r.et of each rank r", (".et",))
GOAL = Kind("a schedule for LogGOPSim", (".goal",))


@dataclass(frozen=True, kw_only=True)
class ExportOptions:
    """What is written, and how."""

    algorithm: Annotated[Choice, Argument("ALGORITHM", parse, is_positional=True)]
    """As NAME or NAME:key=value,…"""
    load: Load = ()
    """Algorithms of your own: Python files or plans."""
    ranks: Count = 8
    """Number of ranks."""
    nodes: Annotated[int | None, Argument("M", at_least(1))] = None
    """Spread the ranks over M nodes."""
    output: Annotated[Outputs, writes(MSCCL, MSCCLPP, CHAKRA, GOAL)]
    """Where it is written."""
    bytes: Annotated[int, Argument("BYTES", size)] = 1 << 20
    """Buffer, with .et and .goal, whose messages have sizes; K, M, G are 2^10, 2^20, 2^30."""
    addition: AdditionRate = 10.0
    """Bytes that a rank adds in a second, with .et and .goal; also 500MB, 20GB."""


READER = make_model_reader(
    "export",
    "Write an all-reduce for another project's runtime or simulator. It is proved "
    "first; prove --load proves what was written, once more from the file.",
    ExportOptions,
    "two-level:outer=halving-doubling",
)


def main(arguments: Sequence[str]) -> None:
    options = pick(ExportOptions, READER.read(arguments))
    check_outputs(options.output, inputs=map(Path, options.load))
    nodes = None if options.nodes is None else split(options.ranks, options.nodes)
    schedule = options.algorithm.build(options.ranks, nodes)
    messages = sum(map(len, schedule.steps))
    # All are made before one is written.
    for output, contents in [(each, write(schedule, options, each)) for each in options.output]:
        for path, content in contents.items():
            write_whole(path, content)
        first, *others = contents
        files = f"{first} and {len(others)} more" if others else str(first)
        has_sizes = output.kind in (CHAKRA, GOAL)
        buffer = f", {describe_size(options.bytes)}" if has_sizes else ""
        print_text(
            f"wrote {files}: {options.algorithm} on {options.ranks} ranks, "
            f"{count_noun(len(schedule.steps), 'step')}, {count_noun(messages, 'message')}{buffer}"
        )


def write(schedule: Schedule, options: ExportOptions, output: Output) -> dict[Path, bytes]:
    """The files with their contents. Raises ConfigurationError if the format cannot hold it."""
    name, path = str(options.algorithm), output.path
    price = options.bytes // ITEM, ITEM, 1 / (options.addition * GIGABYTE)
    if output.kind is CHAKRA:
        traces = enumerate(write_chakra(schedule, *price))
        return {path.with_suffix(f".{rank}{path.suffix}"): each for rank, each in traces}
    if output.kind is GOAL:
        text = write_goal(schedule, *price)
    else:
        text = (write_xml if output.kind is MSCCL else write_json)(schedule, name)
    return {path: text.encode()}

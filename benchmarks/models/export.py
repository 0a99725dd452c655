"""``python -m benchmarks export ALGORITHM``: an all-reduce in the formats of other projects."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from benchmarks.common.checks import check_outputs
from benchmarks.common.machines import GIGABYTE, AdditionRate
from benchmarks.common.options import ITEM, Count, Load, make_model_reader, size
from mpiddp.files import write_whole
from mpiddp.options.checks import at_least
from mpiddp.options.fields import Argument, pick
from mpiddp.schedules.cost import split
from mpiddp.schedules.plans.msccl_writer import write_xml
from mpiddp.schedules.plans.mscclpp_writer import write_json
from mpiddp.schedules.plans.traces import write_chakra, write_goal
from mpiddp.schedules.registry import Choice, parse
from mpiddp.schedules.schedule import Schedule
from mpiddp.wording import count_noun, describe_size, print_text


@dataclass(frozen=True, kw_only=True)
class Options:
    """What is written, and how."""

    algorithm: Annotated[Choice, Argument("ALGORITHM", parse, is_positional=True)]
    """As NAME or NAME:key=value,…"""
    load: Load = ()
    """Algorithms of your own: Python files or plans."""
    ranks: Count = 8
    """Number of ranks."""
    nodes: Annotated[int | None, Argument("M", at_least(1))] = None
    """Spread the ranks over M nodes."""
    format: Literal["msccl-xml", "mscclpp-json", "chakra-et", "goal"] = "msccl-xml"
    """MSCCL's plan, MSCCL++'s execution plan, a trace for ASTRA-sim, a schedule for LogGOPSim."""
    output: Annotated[Path, Argument("FILE")]
    """Where it is written; of chakra-et each rank r has a file FILE.r.et."""
    bytes: Annotated[int, Argument("BYTES", size)] = 1 << 20
    """Buffer, with chakra-et and goal, whose messages have sizes; K, M, G are 2^10, 2^20, 2^30."""
    addition: AdditionRate = 10.0
    """Bytes that a rank adds in a second, with chakra-et and goal; also 500MB, 20GB."""


READER = make_model_reader(
    "export",
    "Write an all-reduce for another project's runtime or simulator. It is proved "
    "first; prove --load proves what was written, once more from the file.",
    Options,
    "two-level:outer=halving-doubling",
)


def main(arguments: Sequence[str]) -> None:
    options = pick(Options, READER.read(arguments))
    check_outputs(options.output, inputs=map(Path, options.load))
    nodes = None if options.nodes is None else split(options.ranks, options.nodes)
    schedule = options.algorithm.build(options.ranks, nodes)
    contents = write(schedule, options)
    for path, content in contents.items():
        write_whole(path, content)
    messages = sum(map(len, schedule.steps))
    first, *others = contents
    files = f"{first} and {len(others)} more" if others else str(first)
    buffer = "" if options.format.startswith("msccl") else f", {describe_size(options.bytes)}"
    print_text(
        f"wrote {files}: {options.algorithm} on {options.ranks} ranks, "
        f"{count_noun(len(schedule.steps), 'step')}, {count_noun(messages, 'message')}{buffer}"
    )


def write(schedule: Schedule, options: Options) -> dict[Path, bytes]:
    """The files with their contents. Raises ConfigurationError if the format cannot hold it."""
    name, output = str(options.algorithm), options.output
    price = options.bytes // ITEM, ITEM, 1 / (options.addition * GIGABYTE)
    if options.format == "chakra-et":
        traces = write_chakra(schedule, *price)
        return {
            output.with_name(f"{output.name}.{rank}.et"): each for rank, each in enumerate(traces)
        }
    if options.format == "goal":
        text = write_goal(schedule, *price)
    else:
        text = (write_xml if options.format == "msccl-xml" else write_json)(schedule, name)
    return {output: text.encode()}

"""``python -m benchmarks explain ALGORITHM``: what an all-reduce does, step by step."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

from benchmarks.common import machines
from benchmarks.common.checks import check_outputs
from benchmarks.common.options import (
    ITEM,
    Count,
    File,
    describe_algorithms,
    describe_seconds,
    describe_size,
    make_reader,
    size,
)
from benchmarks.models.drawing.diagram import draw_diagram
from benchmarks.models.drawing.page import draw_page
from benchmarks.models.drawing.text import describe
from mpiddp.errors import ConfigurationError
from mpiddp.options.checks import at_least
from mpiddp.options.fields import Argument, pick
from mpiddp.schedules.cost import Machine, Simulation, bound, simulate, split, split_in_two
from mpiddp.schedules.registry import LARGEST_SIMULATED, Choice, parse
from mpiddp.schedules.schedule import Schedule, segment

MOST_CELLS = {"svg": 100_000, "text": 10_000_000}
"""Ranks × chunks × steps, above which it is too large to read."""


@dataclass(frozen=True)
class Options:
    choice: Choice
    ranks: int
    nodes: tuple[int, ...] | None
    """The ranks of each node; None if nodes were not spoken of, and the algorithm has no use for
    them, else two halves."""
    size: int
    """Bytes of the buffer."""
    machine: Machine
    svg: Path | None
    html: Path | None
    beside: Choice | None

    @property
    def title(self) -> str:
        ranks = f"{self.ranks} rank{'s' if self.ranks > 1 else ''}"
        if self.nodes is None:
            return f"{self.choice} on {ranks}"
        return f"{self.choice} on {ranks} of {len(self.nodes)} node{'s' * (len(self.nodes) > 1)}"

    @property
    def hosts(self) -> tuple[int, ...]:
        """The ranks of each node, one rank on each if nodes were not spoken of."""
        return (1,) * self.ranks if self.nodes is None else self.nodes


@dataclass(frozen=True, kw_only=True)
class ExplainOptions(machines.MachineOptions):
    """What is shown, and the machine whose prices it gets."""

    algorithm: Annotated[Choice, Argument("ALGORITHM", parse, is_positional=True)]
    """NAME or NAME:key=value,…"""
    ranks: Count = 4
    """Number of ranks."""
    segments: Annotated[int | None, Argument("K", at_least(1))] = None
    """Pipeline the buffer in K parts."""
    nodes: Annotated[int | None, Argument("M", at_least(1))] = None
    """Spread the ranks over M nodes."""
    svg: File = None
    """Draw a space-time diagram."""
    html: File = None
    """Write a page that animates the steps."""
    beside: Annotated[Choice | None, Argument("ALGORITHM", parse)] = None
    """With --html: a second algorithm."""
    bytes: Annotated[int, Argument("BYTES", size)] = 1 << 20
    """Buffer to price; K, M, G are 2^10, 2^20, 2^30 (default: 1M)."""

    def __post_init__(self) -> None:
        if self.segments is not None and self.algorithm.segments > 1:
            raise ConfigurationError(f"{self.algorithm} and --segments: give the segments once")
        if self.beside is not None and self.html is None:
            raise ConfigurationError("--beside needs --html FILE")
        for name, path in (("svg", self.svg), ("html", self.html)):
            if path is not None and path.suffix != f".{name}":
                raise ConfigurationError(f"--{name} {path}: expected a name in .{name}")


READER = make_reader(
    command="explain",
    description="Show an all-reduce step by step: which chunk goes where, what each rank holds, "
    "what it takes. --svg and --html draw it.",
    groups={"options": ExplainOptions},
    epilog=describe_algorithms("ring:segments=4"),
)


def parse_options(arguments: Sequence[str]) -> Options:
    given = pick(ExplainOptions, READER.read(arguments))
    choice, ranks = given.algorithm, given.ranks
    if given.segments is not None:
        choice = replace(choice, segments=given.segments)
    nodes = None if given.nodes is None else split(ranks, given.nodes)
    if nodes is None and choice.algorithm.knows_nodes:
        nodes = split_in_two(ranks)
    machine = machines.read_machine(given, several=nodes is not None)
    return Options(choice, ranks, nodes, given.bytes, machine, given.svg, given.html, given.beside)


def main(arguments: Sequence[str]) -> None:
    options = parse_options(arguments)
    check_outputs(options.svg, options.html)
    schedule = build(options)
    count = options.size // ITEM
    run = simulate(schedule, count, options.machine, options.hosts, item=ITEM)
    if options.svg is None and options.html is None:
        _print_steps(options, schedule, run)
    if options.svg is not None:
        text = draw_diagram(schedule, options.title, notes=_list_notes(run), nodes=options.nodes)
        options.svg.write_text(text, encoding="utf-8")
    if options.html is not None:
        page = draw_page(
            options.choice, options.ranks, options.nodes,
            beside=options.beside, size=options.size, machine=options.machine,
        )  # fmt: skip
        options.html.write_text(page, encoding="utf-8")
    print(*describe_price(options, schedule, run), sep="\n")
    for path in filter(None, (options.svg, options.html)):
        print(f"wrote {path}")


def build(options: Options) -> Schedule:
    """The schedule. Raises ConfigurationError if it is too large to be looked at."""
    if options.ranks > LARGEST_SIMULATED:
        raise _too_large(f"{options.ranks} ranks")
    segments = options.choice.segments
    whole = replace(options.choice, segments=1).build(options.ranks, options.nodes)
    steps, chunks = len(whole.steps) + segments - 1, whole.chunks * segments
    if whole.ranks * chunks * (steps + 1) > MOST_CELLS["svg" if options.svg else "text"]:
        raise _too_large(f"{steps} steps of {whole.ranks} ranks with {chunks} chunks")
    return segment(whole, segments)


def _too_large(what: str) -> ConfigurationError:
    return ConfigurationError(
        f"{what} are more than a picture can show; python -m benchmarks simulate prices them"
    )


def _list_notes(run: Simulation) -> list[str]:
    return [describe_seconds(step.seconds) for step in run.steps]


def _print_steps(options: Options, schedule: Schedule, run: Simulation) -> None:
    print(f"{options.title}: {options.choice.algorithm.summary}")
    colour = sys.stdout.isatty()
    width = shutil.get_terminal_size((100, 24)).columns
    notes = _list_notes(run)
    for line in describe(schedule, width=width, colour=colour, notes=notes, nodes=options.nodes):
        print(line)
    print()


def describe_price(options: Options, schedule: Schedule, run: Simulation) -> Iterator[str]:
    """What it takes on the machine, beside what no algorithm can beat."""
    machine, hosts = options.machine, options.hosts
    several = options.nodes is not None
    messages = sum(step.messages for step in run.steps)
    figures = machines.describe_machine(machine, several=several)
    yield f"{options.title}, {describe_size(options.size)}, {figures}"
    yield f"  {'steps':14}{len(run.steps)}, with {messages} messages of all ranks"
    form, formula = options.choice.closed_form(hosts), ""
    if form is not None:
        formula = machines.describe_form(form, run.seconds, options.size, machine)
    yield f"  {'modelled':14}{describe_seconds(run.seconds)}{formula}"
    least = bound(options.size, machine, hosts, len(schedule.members))
    yield (
        f"  {'lower bound':14}{describe_seconds(least.seconds)}: the greatest of latency "
        f"{describe_seconds(least.latency)}, bandwidth {describe_seconds(least.bandwidth)}, "
        f"additions {describe_seconds(least.addition)}"
    )
    rank = int((run.sent + run.received).argmax())
    yield (
        f"  {'busiest rank':14}{rank} sends {describe_size(int(run.sent[rank]))} and receives "
        f"{describe_size(int(run.received[rank]))}; all ranks send "
        f"{describe_size(int(run.sent.sum()))}"
    )

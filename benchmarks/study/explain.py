"""``python -m benchmarks explain WHAT``: a collective step by step, or a training step."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Annotated

from benchmarks.records import machines
from benchmarks.records.environment import PROGRAM
from benchmarks.records.options import (
    ITEM,
    Count,
    Load,
    describe_algorithms,
    describe_seconds,
    make_reader,
    size,
)
from benchmarks.show.drawing.diagram import draw_diagram
from benchmarks.show.drawing.page import draw_page
from benchmarks.show.drawing.text import describe
from benchmarks.show.drawing.timeline import draw_timeline, draw_timeline_page
from benchmarks.show.drawing.workflow import TrainingStep
from mpiddp.errors import ConfigurationError
from mpiddp.files import write_whole
from mpiddp.options.checks import at_least, positive
from mpiddp.options.fields import Argument, pick
from mpiddp.options.outputs import PAGE, Kind, Outputs, check_outputs, find, writes
from mpiddp.schedules.cost import Simulation, bound, simulate, split, split_in_two
from mpiddp.schedules.machine import Machine
from mpiddp.schedules.registry import LARGEST_SIMULATED, Choice, names, parse
from mpiddp.schedules.schedule import Collective, Schedule, segment
from mpiddp.wording import count_noun, describe_size, print_text

MOST_CELLS = {"svg": 100_000, "text": 10_000_000}
"""Ranks × chunks × steps, above which it is too large to read."""
DIAGRAM = Kind("space-time diagram", (".svg",))
STEP = "training-step"
USUAL = {
    **{each.value: "ring" for each in Collective},
    **{each.value: "gather-broadcast" for each in (Collective.REDUCE, Collective.BROADCAST)},
    STEP: "ring",
}
"""What can be explained beside algorithms, and by which one unless --by names another."""
COMPUTE, BUCKETS = 90.0, 4


@dataclass(frozen=True, kw_only=True)
class ExplainOptions(machines.MachineOptions):
    """What is shown, and the machine whose prices it gets."""

    subject: Annotated[str, Argument("WHAT", is_positional=True)]
    """An algorithm, as NAME or NAME:key=value,…, a collective, or training-step."""
    load: Load = ()
    """Algorithms of your own: Python files or plans."""
    by: Annotated[Choice | None, Argument("ALGORITHM", parse)] = None
    """Algorithm of a collective or a training step (default: ring, or gather-broadcast if there
    is a root)."""
    ranks: Count = 4
    """Number of ranks."""
    segments: Annotated[int | None, Argument("K", at_least(1))] = None
    """Pipeline the buffer in K parts."""
    nodes: Annotated[int | None, Argument("M", at_least(1))] = None
    """Spread the ranks over M nodes."""
    output: Annotated[Outputs, writes(DIAGRAM, PAGE)] = ()
    """Draw a space-time diagram, or write a page that animates the steps."""
    beside: Annotated[Choice | None, Argument("ALGORITHM", parse)] = None
    """In a page: a second algorithm."""
    bytes: Annotated[int | None, Argument("BYTES", size)] = None
    """Buffer to price, or gradients; K, M, G are 2^10, 2^20, 2^30 (default: 1M; training-step:
    64M)."""
    compute: Annotated[float | None, Argument("MS", positive("milliseconds"))] = None
    """With training-step: time of forward and backward (default: 90)."""
    buckets: Annotated[int | None, Argument("K", at_least(1))] = None
    """With training-step: buckets that gradients are in (default: 4)."""

    def __post_init__(self) -> None:
        is_step = self.subject == STEP
        for name, fits in (
            ("by", self.subject in USUAL), ("compute", is_step), ("buckets", is_step),
            ("beside", not is_step),
        ):  # fmt: skip
            if getattr(self, name) is not None and not fits:
                raise ConfigurationError(f"--{name} is not for {self.subject}")
        if self.beside is not None and not find(self.output, PAGE):
            raise ConfigurationError("--beside needs --output FILE.html")

    @cached_property
    def choice(self) -> Choice:
        """The algorithm, for the collective."""
        try:
            named = self.by or parse(USUAL.get(self.subject, self.subject))
        except ConfigurationError as error:
            is_known = self.subject.partition(":")[0] in names()
            raise ConfigurationError(
                str(error) if is_known else f"{error}; and {', '.join(USUAL)}"
            ) from None
        if self.segments is not None and named.segments > 1:
            raise ConfigurationError(f"{named} and --segments: give the segments once")
        kinds = {each.value: each for each in Collective}
        kind = kinds.get(self.subject, Collective.ALL_REDUCE)
        return replace(named, segments=self.segments or named.segments, collective=kind)

    @cached_property
    def sizes(self) -> tuple[int, ...] | None:
        """The ranks of each node; None if nodes were not spoken of, and the algorithm has no use
        for them, else two halves."""
        if self.nodes is not None:
            return split(self.ranks, self.nodes)
        return split_in_two(self.ranks) if self.choice.algorithm.knows_nodes else None

    @cached_property
    def hosts(self) -> tuple[int, ...]:
        """The ranks of each node, one rank on each if nodes were not spoken of."""
        return self.sizes or (1,) * self.ranks

    @cached_property
    def machine(self) -> Machine:
        return machines.read_machine(self, several=self.sizes is not None)

    @property
    def size(self) -> int:
        """Bytes of the buffer, or of all gradients."""
        return self.bytes if self.bytes is not None else (64 if self.subject == STEP else 1) << 20

    @property
    def title(self) -> str:
        what = f"{self.subject} by {self.choice}" if self.subject in USUAL else str(self.choice)
        nodes = "" if self.sizes is None else f" of {count_noun(len(self.sizes), 'node')}"
        return f"{what} on {count_noun(self.ranks, 'rank')}{nodes}"


READER = make_reader(
    command="explain",
    description="Show a collective step by step: which chunk goes where, what each rank holds, "
    "what it takes; or the workflow of a training step, with what overlaps. --output draws it.",
    groups={"options": ExplainOptions},
    epilog=f"WHAT is {', '.join(USUAL)} or ALGORITHM, for its all-reduce. "
    + describe_algorithms("ring:segments=4"),
)


def parse_options(arguments: Sequence[str]) -> ExplainOptions:
    return pick(ExplainOptions, READER.read(arguments))


def main(arguments: Sequence[str]) -> None:
    options = parse_options(arguments)
    check_outputs(options.output)
    (_explain_step if options.subject == STEP else _explain_collective)(options)
    for output in options.output:
        print_text(f"wrote {output}")


def _explain_collective(options: ExplainOptions) -> None:
    schedule = build(options)
    count = options.size // ITEM
    run = simulate(schedule, count, options.machine, options.hosts, item=ITEM)
    if not options.output:
        _print_steps(options, schedule, run)
    for path in find(options.output, DIAGRAM):
        text = draw_diagram(schedule, options.title, notes=_list_notes(run), nodes=options.sizes)
        write_whole(path, text)
    for path in find(options.output, PAGE):
        beside = options.beside and replace(options.beside, collective=options.choice.collective)
        page = draw_page(
            options.choice, options.ranks, options.sizes,
            beside=beside, size=options.size, machine=options.machine,
        )  # fmt: skip
        write_whole(path, page)
    print_text(*describe_price(options, schedule, run))


def _explain_step(options: ExplainOptions) -> None:
    machine, schedule = options.machine, build(options)
    count = options.buckets or BUCKETS
    run = simulate(schedule, options.size // ITEM // count, machine, options.hosts, item=ITEM)
    # The update reads and writes weights as a rank adds.
    step = TrainingStep(
        (options.compute or COMPUTE) / 1000, (run.seconds,) * count, options.size * machine.addition
    )
    for path in find(options.output, DIAGRAM):
        write_whole(path, draw_timeline(step, options.title))
    for path in find(options.output, PAGE):
        write_whole(path, draw_timeline_page(step, options.title))
    figures = machines.describe_machine(machine, several=options.sizes is not None)
    print_text(f"{options.title}, {describe_size(options.size)} of gradients, {figures}\n")
    print_text(*step.describe(shutil.get_terminal_size((100, 24)).columns))


def build(options: ExplainOptions) -> Schedule:
    """The schedule. Raises ConfigurationError if it is too large to be looked at."""
    if options.ranks > LARGEST_SIMULATED:
        raise _too_large(f"{options.ranks} ranks")
    segments = options.choice.segments
    whole = replace(options.choice, segments=1).build(options.ranks, options.sizes)
    steps, chunks = len(whole.steps) + segments - 1, whole.chunks * segments
    most = MOST_CELLS["svg" if find(options.output, DIAGRAM) else "text"]
    if whole.ranks * chunks * steps > most:
        raise _too_large(f"{steps} steps of {whole.ranks} ranks with {chunks} chunks")
    return segment(whole, segments)


def _too_large(what: str) -> ConfigurationError:
    return ConfigurationError(
        f"{what} are more than a picture can show; {PROGRAM} simulate prices them"
    )


def _list_notes(run: Simulation) -> list[str]:
    return [describe_seconds(step.seconds) for step in run.steps]


def _print_steps(options: ExplainOptions, schedule: Schedule, run: Simulation) -> None:
    print_text(f"{options.title}: {options.choice.summary}")
    colour = sys.stdout.isatty()
    width = shutil.get_terminal_size((100, 24)).columns
    notes = _list_notes(run)
    for line in describe(schedule, width=width, colour=colour, notes=notes, nodes=options.sizes):
        print_text(line)
    print_text()


def describe_price(options: ExplainOptions, schedule: Schedule, run: Simulation) -> Iterator[str]:
    """What it takes on the machine, beside what no algorithm can beat."""
    machine, hosts = options.machine, options.hosts
    several = options.sizes is not None
    messages = sum(step.messages for step in run.steps)
    figures = machines.describe_machine(machine, several=several)
    yield f"{options.title}, {describe_size(options.size)}, {figures}"
    yield f"  {'steps':14}{len(run.steps)}, with {messages} messages of all ranks"
    form, formula = options.choice.closed_form(hosts), ""
    if form is not None:
        formula = machines.describe_form(form, run.seconds, options.size, machine)
    yield f"  {'modelled':14}{describe_seconds(run.seconds)}{formula}"
    least = bound(options.size, machine, hosts, len(schedule.members), schedule.collective)
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
